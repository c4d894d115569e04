"""RabbitMQ, from the packages of Debian's unstable release, with Erlang.

They run with their loader and their C library, which are newer than those of
the system may be. Erlang's programs start one another by their paths, so each
is put behind a script of its name that calls the loader.

Beside the package, the cache holds a folder of two scripts, which tests use to
have nodes of their own: `server` starts a node in a folder, and `control` is
rabbitmqctl for the node in that folder.
"""

import hashlib
import shutil
import signal
import urllib.parse
from pathlib import Path

from . import debian, packages
from .failure import Failure
from .process import Process, spawn
from .server import CONFIG, Place, Server, exchange

# The release that the tests were written against; which one Debian has is seen
# when it has been fetched.
SERIES = "4.3"
# Those of Erlang's programs that RabbitMQ and rabbitmqctl run.
PROGRAMS = ("beam.smp", "epmd", "erl_child_setup", "erlexec", "escript", "inet_gethost")

PROGRAM_SCRIPT = """\
#!/bin/sh
package=${{0%/usr/lib/erlang/*}}
exec "$package/{loader}" --argv0 "$0" --library-path "$package/{libraries}" "$0.elf" "$@"
"""
ERL_SCRIPT = """\
#!/bin/sh
export BINDIR="${0%/*}" ROOTDIR="${0%/erts-*}" EMU=beam PROGNAME=erl
exec "$BINDIR/erlexec" "$@"
"""
# Arguments: a folder, which holds rabbitmq.conf, and three ports. The port
# mapper is the node's own and ends with it, killed or not; Erlang would leave
# it running, and share it with whatever else speaks Erlang on the machine. The
# node replaces the shell, so that who started this can signal it.
SERVER_SCRIPT = """\
#!/bin/sh
set -eu
cat >"$1/node" <<END
export HOME='$1' ERL_EPMD_ADDRESS=127.0.0.1 ERL_EPMD_PORT=$4
export RABBITMQ_NODENAME=rabbit@localhost RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT=$2 RABBITMQ_DIST_PORT=$3
export RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_CONFIG_FILE='$1/rabbitmq.conf' RABBITMQ_CONFIG_FILES='$1/none/*.conf'
export RABBITMQ_MNESIA_BASE='$1/data' RABBITMQ_LOGS=- RABBITMQ_ENABLED_PLUGINS_FILE='$1/plugins'
END
. "$1/node"
echo '[].' >"$1/plugins"
package=$(cd "${{0%/*}}/../{package}" && pwd)
PATH=$(echo "$package"/usr/lib/erlang/erts-*/bin):$PATH
setpriv --pdeathsig KILL epmd &
until epmd -names >/dev/null 2>&1; do kill -0 $!; sleep 0.02; done
export RUNNING_UNDER_SYSTEMD=true # which means just that: no shell stays
export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {{127,0,0,1}}'
exec "$package"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server
"""
# Arguments: the folder of a node, and what to tell it.
CONTROL_SCRIPT = """\
#!/bin/sh
set -eu
. "$1/node"
shift
package=$(cd "${{0%/*}}/../{package}" && pwd)
PATH=$(echo "$package"/usr/lib/erlang/erts-*/bin):$PATH
exec "$package"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmqctl "$@"
"""


class Rabbitmq(Server):
    name = "rabbitmq"
    image = f"rabbitmq:{SERIES}"
    address_variable = "OUTBOXD_TEST_RABBITMQ_URL"
    port_variables = (
        "OUTBOXD_RABBITMQ_PORT",
        "OUTBOXD_RABBITMQ_TLS_PORT",
        "OUTBOXD_RABBITMQ_NODE_PORT",
        "OUTBOXD_RABBITMQ_MAPPER_PORT",
    )
    # Nothing of it is kept, so it need not tidy up.
    stop_signal = signal.SIGKILL

    @property
    def title(self) -> str:
        version = packages.cache_folder() / f"rabbitmq-{SERIES}/version"
        return f"RabbitMQ {version.read_text() if version.exists() else SERIES}"

    def fetch(self) -> None:
        self._scripts()

    def start(self, place: Place) -> Process:
        port, tls_port, node_port, mapper_port = (place.ports[name] for name in self.port_variables)
        settings = (CONFIG / "rabbitmq.conf").read_text()
        for ours, theirs in (
            ("tcp.default = 5672", f"tcp.default = 127.0.0.1:{port}"),
            ("ssl.default = 5671", f"ssl.default = 127.0.0.1:{tls_port}"),
            ("/certificates", str(place.certificates)),
        ):
            settings = settings.replace(ours, theirs)
        (place.folder / "rabbitmq.conf").write_text(settings)
        return spawn([self._scripts() / "server", place.folder, port, node_port, mapper_port], log=place.log)

    def address(self, ports: dict[str, int]) -> str:
        return f"amqp://guest:guest@127.0.0.1:{ports['OUTBOXD_RABBITMQ_PORT']}/%2f"

    def answers(self, address: str) -> bool:
        """Whether it answers the header of AMQP 0-9-1 with a frame that holds
        `connection.start`; it opens its ports when all else is done."""
        url = urllib.parse.urlsplit(address)
        header = b"AMQP\x00\x00\x09\x01"
        # A frame begins with its type, its channel and its length.
        reply = exchange(url.hostname or "localhost", url.port or 5672, header, 11)
        return reply[:1] == b"\x01" and reply[7:] == b"\x00\x0a\x00\x0a"

    def exports(self, place: Place) -> dict[str, str]:
        port = place.ports["OUTBOXD_RABBITMQ_TLS_PORT"]
        return {"OUTBOXD_TEST_RABBITMQ_TLS_URL": f"amqps://guest:guest@127.0.0.1:{port}/%2f"}

    def package_exports(self) -> dict[str, str]:
        scripts = self._scripts()
        return {
            "OUTBOXD_TEST_RABBITMQ_SERVER": str(scripts / "server"),
            "OUTBOXD_TEST_RABBITMQ_CONTROL": str(scripts / "control"),
        }

    def _scripts(self) -> Path:
        package = packages.cached(f"rabbitmq-{SERIES}", _unpack).name
        scripts = {
            "server": SERVER_SCRIPT.format(package=package),
            "control": CONTROL_SCRIPT.format(package=package),
        }

        def make(folder: Path) -> None:
            for name, text in scripts.items():
                _write_script(folder / name, text)

        recipe = hashlib.sha256("".join(scripts.values()).encode()).hexdigest()[:8]
        return packages.cached(f"{package}-run-{recipe}", make)


def _unpack(folder: Path) -> None:
    debian.unpack(["rabbitmq-server"], folder)
    # The rest is for a system that they would be installed in.
    for path in [*folder.iterdir(), *folder.glob("usr/*")]:
        if path.name not in ("usr", "lib"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    loader = debian.loader()
    try:
        (erlang,) = folder.glob("usr/lib/erlang/erts-*/bin")
        (broker,) = folder.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*")
    except ValueError as error:
        raise Failure("Debian's RabbitMQ is not laid out as expected: see tests/servers/rabbitmq.py") from error
    for name in PROGRAMS:
        (erlang / name).rename(erlang / f"{name}.elf")
        _write_script(erlang / name, PROGRAM_SCRIPT.format(loader=loader, libraries=Path(loader).parent))
    _write_script(erlang / "erl", ERL_SCRIPT)
    (folder / "version").write_text(broker.name.partition("-")[2])


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
