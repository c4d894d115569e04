"""PostgreSQL, from the embeddable binaries that Maven distributes.

They hold initdb, pg_ctl and postgres, but no client: the roles are made in
single-user mode before the server starts, and readiness is asked for with a
start-up packet of our own.
"""

import shutil
import signal
import struct
import subprocess
import tarfile
import tempfile
import urllib.parse
import zipfile
from pathlib import Path

from . import packages
from .failure import Failure
from .process import Process, as_user, give_to, run, spawn, unprivileged_user
from .server import CONFIG, Place, Server, exchange

PASSWORD = "postgres"


class Postgres(Server):
    # SIGTERM waits for clients to leave and SIGINT for replication clients to
    # catch up; a test that left either behind must not hold up `down`.
    stop_signal = signal.SIGQUIT
    # What config/postgresql.conf leaves out or sets otherwise.
    settings: dict[str, str] = {}

    def __init__(self, name: str, version: str, certificate: str):
        """`postgres` is the newest supported server, `postgres-old` the oldest."""
        age = "_OLD" if name == "postgres-old" else ""
        self.name = name
        self.version = version
        self.certificate = certificate
        self.title = f"PostgreSQL {version}"
        self.image = f"postgres:{version}"
        self.address_variable = f"OUTBOXD_TEST_POSTGRES{age}_URL"
        self.socket_variable = f"OUTBOXD_TEST_POSTGRES{age}_SOCKET"
        self.bin_variable = f"OUTBOXD_TEST_PG{age}_BIN"
        self.port_variable = f"OUTBOXD_POSTGRES{age}_PORT"
        self.port_variables = (self.port_variable,)

    def fetch(self) -> None:
        binaries = self._package() / "bin"
        user = unprivileged_user()
        try:
            subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, **as_user(user))
        except (OSError, subprocess.CalledProcessError) as error:
            raise Failure(
                f"{binaries}/postgres does not run as {user or 'this user'} ({error}): "
                "set OUTBOXD_SERVICES_CACHE to a folder that this user can reach and execute from"
            ) from error

    def start(self, place: Place) -> Process:
        binaries = self._package() / "bin"
        user = unprivileged_user()
        data, sockets = place.folder / "data", self._sockets(place)
        for folder in (data, sockets):
            folder.mkdir()
            give_to(folder, user)

        password = place.folder / "password"
        password.write_text(PASSWORD)
        give_to(password, user)
        run(
            [binaries / "initdb", "--pgdata", data, "--username=postgres", f"--pwfile={password}"]
            # The folder lives as long as the tests: no need to reach the disk.
            + ["--no-locale", "--encoding=UTF8", "--auth=scram-sha-256", "--no-sync"],
            log=place.log,
            user=user,
        )
        for source, name in (
            (CONFIG / "postgresql.conf", "postgresql.conf"),
            (CONFIG / "pg_hba.conf", "pg_hba.conf"),
            (place.certificates / "ca.pem", "ca.pem"),
            (place.certificates / f"{self.certificate}.pem", "server.crt"),
            (place.certificates / f"{self.certificate}.key", "server.key"),
        ):
            shutil.copyfile(source, data / name)
            (data / name).chmod(0o600)
            give_to(data / name, user)
        run(
            [binaries / "postgres", "--single", "-D", data, "-c", "exit_on_error=on", "postgres"],
            stdin=(CONFIG / "roles.sql").read_text(),
            log=place.log,
            user=user,
        )
        return spawn(
            [binaries / "postgres", "-D", data]
            + ["-c", "listen_addresses=127.0.0.1", "-c", f"port={place.ports[self.port_variable]}"]
            + ["-c", f"unix_socket_directories={sockets}", "-c", "ssl_ca_file=ca.pem"]
            + [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")],
            log=place.log,
            user=user,
        )

    def prepare_for_docker(self, place: Place) -> dict[str, str]:
        sockets = self._sockets(place)
        sockets.mkdir()
        # The container's postgres user, whose id is not ours, binds here.
        sockets.chmod(0o777)
        return {self.socket_variable: str(sockets)}

    def address(self, ports: dict[str, int]) -> str:
        return f"postgres://postgres:{PASSWORD}@127.0.0.1:{ports[self.port_variable]}/postgres"

    def answers(self, address: str) -> bool:
        """Whether it lets a client proceed to authentication; a server that
        still starts answers with an error instead."""
        url = urllib.parse.urlsplit(address)
        user = urllib.parse.unquote(url.username or "postgres").encode()
        parameters = b"user\0" + user + b"\0database\0postgres\0\0"
        protocol_3_0 = struct.pack(">i", 3 << 16)
        packet = struct.pack(">i", 8 + len(parameters)) + protocol_3_0 + parameters
        return exchange(url.hostname or "localhost", url.port or 5432, packet, 1) == b"R"

    def exports(self, place: Place) -> dict[str, str]:
        return {self.socket_variable: str(self._sockets(place))}

    def package_exports(self) -> dict[str, str]:
        exports = {self.bin_variable: str(self._package() / "bin")}
        user = unprivileged_user()
        if user is not None:
            exports["OUTBOXD_TEST_PG_USER"] = user
        return exports

    def _sockets(self, place: Place) -> Path:
        return place.folder / "sockets"

    def _package(self) -> Path:
        return packages.cached(f"postgresql-{self.version}", self._unpack)

    def _unpack(self, folder: Path) -> None:
        artifact = f"io.zonky.test.postgres:embedded-postgres-binaries-{packages.architecture()}:{self.version}.0"
        with tempfile.TemporaryDirectory(prefix="outboxd-postgres-") as scratch:
            packages.fetch_jars([artifact], Path(scratch))
            (jar,) = Path(scratch).glob("*.jar")
            with zipfile.ZipFile(jar) as outer:
                (name,) = (name for name in outer.namelist() if name.endswith(".txz"))
                with outer.open(name) as compressed, tarfile.open(fileobj=compressed, mode="r|xz") as inner:
                    # Pythons before 3.11.4 may lack the filter that newer ones ask for.
                    inner.extraction_filter = getattr(tarfile, "data_filter", None)
                    inner.extractall(folder)
