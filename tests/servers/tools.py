"""Programs that tests use and that are no servers.

They come from Debian's unstable release like some of the servers do, unpacked
beside the system, and run with the loader and the libraries that came with them.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from . import debian, packages
from .failure import Failure
from .process import run

CARGO_DEB = "3.8.0"
# It has the schemas of all versions of Kubernetes up to its own.
KUBERNETES_VALIDATE = "1.37.0"

SCRIPT = """\
#!/bin/sh
package=${{0%/*}}
exec "$package/{loader}" --argv0 "$package/{program}" --library-path "$package/{libraries}" "$package/{program}" "$@"
"""


@dataclass(frozen=True)
class Package:
    # Debian's, and the folder in the cache with the release that the tests were written against.
    name: str
    folder: str
    # Where in the package each program is.
    programs: dict[str, str]

    def fetch(self) -> Path:
        return packages.cached(self.folder, self._unpack)

    def _unpack(self, folder: Path) -> None:
        debian.unpack([self.name], folder)
        # The rest is for a system that it would be installed in.
        for path in [*folder.iterdir(), *folder.glob("usr/*")]:
            if path.name not in ("usr", "bin", "lib", "libexec"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        loader = debian.loader()
        for name, program in self.programs.items():
            if not (folder / program).is_file():
                raise Failure(f"Debian's {self.name} has no {program}: see tests/servers/tools.py")
            script = folder / name
            script.write_text(SCRIPT.format(loader=loader, libraries=Path(loader).parent, program=program))
            script.chmod(0o755)


ALL = [
    Package("prometheus", "prometheus-3", {"prometheus": "usr/bin/prometheus", "promtool": "usr/bin/promtool"}),
    Package("docker-compose", "docker-compose-2", {"docker-compose": "usr/libexec/docker/cli-plugins/docker-compose"}),
]


def tool(name: str) -> Path:
    """The program of this name, fetched if it is not there yet."""
    for package in ALL:
        if name in package.programs:
            return package.fetch() / name
    known = sorted(name for package in ALL for name in package.programs)
    raise Failure(f"there is no tool `{name}`: there are {', '.join(known)}")


def cargo_deb() -> Path:
    """The folder of `cargo-deb`, which is compiled once; without optimisation, for it has little to do."""

    def make(folder: Path) -> None:
        install = ["cargo", "install", "cargo-deb", "--version", CARGO_DEB, "--locked", "--debug", "--root", folder]
        run(install, log=folder / "install.log")

    return packages.cached(f"cargo-deb-{CARGO_DEB}", make) / "bin"


def kubernetes_validate() -> list[Path | str]:
    """The command that knows Kubernetes' schemas, in a Python environment of its own."""

    def make(folder: Path) -> None:
        log = folder / "install.log"
        run([sys.executable, "-m", "venv", folder], log=log)
        package = f"kubernetes-validate=={KUBERNETES_VALIDATE}"
        run([folder / "bin/python", "-m", "pip", "install", "--quiet", package], log=log)

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = packages.cached(f"kubernetes-validate-{KUBERNETES_VALIDATE}-python-{python}", make)
    # Its script names the folder in which it was made.
    return [environment / "bin/python", "-m", "kubernetes_validate"]
