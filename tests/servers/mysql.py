"""MySQL, from the packages of Debian's unstable release.

It runs with their loader and their C library, which are newer than those of
the system may be.
"""

import re
import shutil
from pathlib import Path

from . import debian, packages
from .mysql_family import MysqlFamily
from .process import run

# The release that the tests were written against; which one Debian has is seen
# when it has been fetched.
SERIES = "9.7"
CLIENTS = ("mysql", "mysqlbinlog")


class Mysql(MysqlFamily):
    name = "mysql"
    image = f"mysql:{SERIES}"
    scheme = "mysql"
    prefix = "OUTBOXD_TEST_MYSQL"
    server_variable = "OUTBOXD_TEST_MYSQLD"
    server_options = (
        '--basedir="$package/usr" --lc-messages-dir="$package/usr/share/mysql" '
        '--character-sets-dir="$package/usr/share/mysql/charsets" '
        '--plugin-dir="$package/usr/lib/mysql/plugin" --secure-file-priv=NULL --mysqlx=OFF'
    )
    data_options = ("--innodb-redo-log-capacity=32M", "--innodb-doublewrite=OFF")

    @property
    def title(self) -> str:
        version = packages.cache_folder() / f"mysql-{SERIES}/version"
        return f"MySQL {version.read_text() if version.exists() else SERIES}"

    @property
    def server(self) -> str:
        return _call("usr/sbin/mysqld")

    @property
    def client(self) -> str:
        return _call("usr/bin/mysql")

    def package(self) -> Path:
        return packages.cached(f"mysql-{SERIES}", _unpack)

    def make_data(self, data: Path, server: Path, users: Path, log: Path) -> None:
        run(
            [server, "--initialize-insecure", f"--datadir={data}", f"--init-file={users}", *self.data_options],
            log=log,
        )


def _call(program: str) -> str:
    loader = debian.loader()
    return f'"$package/{loader}" --library-path "$package/{Path(loader).parent}" "$package/{program}"'


def _unpack(folder: Path) -> None:
    debian.unpack(["mysql-server-core", "mysql-client-core"], folder)
    # Most of the rest is Perl, for scripts that nobody runs here.
    for path in [*folder.glob("usr/share/*"), *folder.glob("usr/lib/*/perl*")]:
        if path.name != "mysql":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in folder.glob("usr/bin/*"):
        if path.name not in CLIENTS:
            path.unlink()
    script = f"package=$1; exec {_call('usr/sbin/mysqld')} --no-defaults --version"
    log = folder / "version"
    run(["sh", "-c", script, "sh", folder], log=log)
    version = re.search(r"Ver ([\d.]+)", log.read_text())
    log.write_text(version[1] if version else SERIES)
