"""What MySQL and MariaDB have in common: their protocol, and programs that the
tests start as well, to have servers of their own.

Beside a package, the cache holds a folder made from it: scripts that start its
programs, and data to copy, which is sooner done than making them.
"""

import hashlib
import signal
import socket
import ssl
import struct
import urllib.parse
from pathlib import Path

from . import packages
from .failure import Failure
from .process import Process, run, spawn
from .server import CONFIG, Place, Server

PASSWORD = "mysql"
ACCESS_DENIED = 1045

# With the parts of its package and no settings but those given; the first
# argument may be --defaults-file=FILE. A lookup of the clients' names could
# take longer than a test.
SERVER_SCRIPT = """\
#!/bin/sh
package=$(cd "${{0%/*}}/../{package}" && pwd) || exit
case ${{1-}} in
    --defaults-file=*) defaults=$1; shift ;;
    *) defaults=--no-defaults ;;
esac
if [ "$(id -u)" = 0 ]; then set -- --user=root "$@"; fi
exec {program} "$defaults" {options} --skip-name-resolve "$@"
"""
PROGRAM_SCRIPT = """\
#!/bin/sh
package=$(cd "${{0%/*}}/../{package}" && pwd) || exit
exec {program} "$@"
"""
# Fills the data folder that it is given, unless that is filled already.
INITIALIZE_SCRIPT = """\
#!/bin/sh
set -eu
if [ -e "$1/ibdata1" ]; then exit 0; fi
umask 077
mkdir -p "$1"
cp -R "${0%/*}/data/." "$1"
"""


class MysqlFamily(Server):
    # Nothing of it is kept, so it need not tidy up.
    stop_signal = signal.SIGKILL
    # The scheme of its addresses.
    scheme: str
    # How its variables begin, and the one that names its server program.
    prefix: str
    server_variable: str
    # How a script calls its server and its client, and what it tells the
    # server; the folder of the package is $package.
    server: str
    server_options: str
    client: str
    # Options with which its data are made.
    data_options: tuple[str, ...] = ()

    def __init__(self):
        self.address_variable = f"{self.prefix}_URL"
        self.port_variable = f"OUTBOXD_{self.name.upper()}_PORT"
        self.port_variables = (self.port_variable,)

    def package(self) -> Path:
        """The unpacked package."""
        raise NotImplementedError

    def make_data(self, data: Path, server: Path, users: Path, log: Path) -> None:
        """Makes a data folder, with what the file `users` creates in it."""
        raise NotImplementedError

    def fetch(self) -> None:
        self.programs()

    def start(self, place: Place) -> Process:
        data = place.folder / "data"
        run([self.programs() / "initialize", data], log=place.log)
        # Not /tmp: MariaDB deletes the temporary tables it finds when it starts, another server's too.
        temporary = place.folder / "tmp"
        temporary.mkdir()
        return spawn(
            [self.programs() / "server", f"--defaults-file={CONFIG}/{self.name}.cnf", f"--datadir={data}"]
            + [f"--tmpdir={temporary}"]
            + ["--bind-address=127.0.0.1", f"--port={place.ports[self.port_variable]}"]
            + [f"--socket={place.folder}/socket", f"--pid-file={place.folder}/pid"]
            + [f"--ssl-ca={place.certificates}/ca.pem"]
            + [f"--ssl-cert={place.certificates}/server.pem", f"--ssl-key={place.certificates}/server.key"],
            log=place.log,
        )

    def address(self, ports: dict[str, int]) -> str:
        return f"{self.scheme}://root:{PASSWORD}@127.0.0.1:{ports[self.port_variable]}/"

    def answers(self, address: str) -> bool:
        url = urllib.parse.urlsplit(address)
        try:
            return logs_in(
                url.hostname or "localhost",
                url.port or 3306,
                urllib.parse.unquote(url.username or "root"),
                urllib.parse.unquote(url.password or ""),
            )
        except OSError:
            return False

    def package_exports(self) -> dict[str, str]:
        programs = self.programs()
        return {
            self.server_variable: str(programs / "server"),
            f"{self.prefix}_CLIENT": str(programs / "client"),
            f"{self.prefix}_INITIALIZE": str(programs / "initialize"),
        }

    def programs(self) -> Path:
        """The folder with `server`, `client` and `initialize`."""
        package = self.package().name
        users = CONFIG / f"{self.name}.sql"
        scripts = {
            "server": SERVER_SCRIPT.format(package=package, program=self.server, options=self.server_options),
            "client": PROGRAM_SCRIPT.format(package=package, program=self.client),
            "initialize": INITIALIZE_SCRIPT,
        }
        recipe = "\n".join([*scripts.values(), *self.data_options, users.read_text()])

        def make(folder: Path) -> None:
            for name, text in scripts.items():
                (folder / name).write_text(text)
                (folder / name).chmod(0o755)
            self.make_data(folder / "data", folder / "server", users, folder / "log")
            # It identifies a server; each makes one for itself.
            (folder / "data/auto.cnf").unlink(missing_ok=True)

        return packages.cached(f"{package}-run-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}", make)


def logs_in(host: str, port: int, user: str, password: str) -> bool:
    """Whether the server accepts the password. Raises OSError where nobody
    listens or the connection breaks."""
    with socket.create_connection((host, port), timeout=5) as plain:
        connection = _Packets(plain)
        greeting = connection.receive()
        if greeting[:1] != b"\x0a":
            return False
        # After the version: connection id, nonce, filler, capabilities, character set,
        # status, capabilities, nonce length, reserved, more of the nonce, method.
        rest = greeting[1:].partition(b"\0")[2]
        nonce, offered = rest[4:12] + rest[31:43], struct.unpack("<I", rest[13:15] + rest[18:20])[0]
        method = rest[44:].partition(b"\0")[0]
        protocol_41, tls, long_nonce, named_method = 1 << 9, 1 << 11, 1 << 15, 1 << 19
        wanted, largest_packet, utf8mb4 = protocol_41 | long_nonce | named_method, 1 << 24, 45
        if offered & tls:
            wanted |= tls
            connection.send(struct.pack("<IIB23x", wanted, largest_packet, utf8mb4))
            # The tests look at certificates; here the password is nobody's secret.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection.socket = context.wrap_socket(plain)
        proof = _proof(method, password.encode(), nonce)
        connection.send(
            struct.pack("<IIB23x", wanted, largest_packet, utf8mb4)
            + (user.encode() + b"\0" + bytes([len(proof)]) + proof + method + b"\0")
        )
        try:
            return _finish_login(connection, password.encode(), encrypted=bool(wanted & tls))
        finally:
            if connection.socket is not plain:
                connection.socket.close()


def _finish_login(connection: "_Packets", password: bytes, encrypted: bool) -> bool:
    while True:
        reply = connection.receive()
        match reply[:1]:
            case b"\x00":
                # Farewell, or the server counts the connection as broken off.
                connection.count = 0
                connection.send(b"\x01")
                return True
            case b"\xfe":
                method, _, nonce = reply[1:].partition(b"\0")
                connection.send(_proof(method, password, nonce[:20]))
            case b"\x01" if reply[1:] == b"\x03":
                # It was right; that we are in follows.
                continue
            case b"\x01" if encrypted:
                connection.send(password + b"\0")
            case b"\x01":
                # Without TLS it wants the password under its RSA key: it serves.
                return True
            case b"\xff" if int.from_bytes(reply[1:3], "little") == ACCESS_DENIED:
                # Asking again would not help.
                raise Failure(f"the server refuses the login: {reply[9:].decode(errors='replace')}")
            case _:
                return False


def _proof(method: bytes, password: bytes, nonce: bytes) -> bytes:
    if not password:
        return b""
    if method == b"mysql_native_password":
        once = hashlib.sha1(password).digest()
        mask = hashlib.sha1(nonce + hashlib.sha1(once).digest()).digest()
    else:
        once = hashlib.sha256(password).digest()
        mask = hashlib.sha256(hashlib.sha256(once).digest() + nonce).digest()
    return bytes(left ^ right for left, right in zip(once, mask))


class _Packets:
    """Packets of the client protocol: three bytes of length, one that counts, content."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.count = 0

    def send(self, content: bytes) -> None:
        self.socket.sendall(struct.pack("<I", len(content))[:3] + bytes([self.count & 0xFF]) + content)
        self.count += 1

    def receive(self) -> bytes:
        header = self._exactly(4)
        self.count = header[3] + 1
        return self._exactly(int.from_bytes(header[:3], "little"))

    def _exactly(self, length: int) -> bytes:
        content = b""
        while len(content) < length:
            more = self.socket.recv(length - len(content))
            if not more:
                raise ConnectionError("the server closed the connection")
            content += more
        return content
