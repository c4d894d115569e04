"""What every test server has in common."""

import os
import random
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from .failure import Failure
from .process import Process

CONFIG = Path(__file__).resolve().parent / "config"


@dataclass(frozen=True)
class Place:
    """Where a server runs: its own folder, its ports by the name of their
    variable, and the certificates that all servers share."""

    folder: Path
    ports: dict[str, int]
    certificates: Path

    @property
    def log(self) -> Path:
        return self.folder / "server.log"


class Server:
    # The name of its folder, its entry in the state and its Docker Compose service.
    name: str
    # Its name and version for people.
    title: str
    # The Docker image of the same version.
    image: str
    # The variable that holds its address: read as the user's wish, exported to the tests.
    address_variable: str
    # The variables through which docker-compose.yml and the server's own
    # configuration learn its ports.
    port_variables: tuple[str, ...]
    # What ends it without regard for its data.
    stop_signal = signal.SIGTERM

    def fetch(self) -> None:
        """Gets the package into the cache, if it is not there yet."""
        raise NotImplementedError

    def start(self, place: Place) -> Process:
        """Starts it from its package in an empty folder; does not wait for it."""
        raise NotImplementedError

    def set_up(self, place: Place, process: Process) -> None:
        """Does what remains once the server runs, where the package needs that;
        all servers have been started by then."""

    def prepare_for_docker(self, place: Place) -> dict[str, str]:
        """Makes ready what its service mounts; returns the variables that name it."""
        return {}

    def address(self, ports: dict[str, int]) -> str:
        raise NotImplementedError

    def answers(self, address: str) -> bool:
        """Whether a client that arrives now is served."""
        raise NotImplementedError

    def exports(self, place: Place) -> dict[str, str]:
        """What tests can use of a server that we started, besides its address."""
        return {}

    def package_exports(self) -> dict[str, str]:
        """What tests need to start private servers from the package."""
        return {}


def free_ports(names: tuple[str, ...], wished: dict[str, int]) -> dict[str, int]:
    """A port for each name: the wished one if it is free, else any.

    They lie below the range from which the kernel takes the local ports of
    outgoing connections; one from that range could be taken by any client
    while the server that it is meant for starts or restarts.
    """
    ports: dict[str, int] = {}
    for name in names:
        candidates = ([wished[name]] if name in wished else []) + random.sample(range(20000, 32000), 200)
        port = next((port for port in candidates if port not in ports.values() and _is_free(port)), None)
        if port is None:
            raise Failure("no free port between 20000 and 32000 on 127.0.0.1")
        ports[name] = port
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do; otherwise the closed connections of a server
        # that just ended would hold its port for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def exchange(host: str, port: int, request: bytes, length: int) -> bytes:
    """Sends `request` and returns the first `length` bytes of the reply, or
    what came of it; nothing when nobody listens."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(request)
            reply = b""
            while len(reply) < length:
                more = connection.recv(length - len(reply))
                if not more:
                    break
                reply += more
            return reply
    except OSError:
        return b""


def environment(extra: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **extra}
