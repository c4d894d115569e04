"""Packages of Debian's unstable release, unpacked beside the system.

Nothing is installed: apt gets a state, a cache and a source of its own, takes
every package for missing, and so fetches a program with all its libraries, the
C library and its loader included. The source is the machine's own entry for
Debian with the suite exchanged, hence its mirror, proxy and signing keys.
"""

import platform
import re
import tempfile
from pathlib import Path

from .failure import Failure
from .process import run

SUITE = "sid"
RELEASES = {"sid", "unstable", "testing", "stable", "oldstable", "oldoldstable"}
LOADERS = {
    "x86_64": "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    "aarch64": "usr/lib/aarch64-linux-gnu/ld-linux-aarch64.so.1",
}


def loader() -> str:
    """Where in an unpacked folder the loader is; the libraries lie beside it."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in LOADERS:
        raise Failure(f"there are no Debian packages for {platform.system()} on {machine}: run the tests on Linux")
    return LOADERS[machine]


def unpack(names: list[str], folder: Path) -> None:
    """Unpacks packages and all they depend on into `folder`."""
    sources = machine_sources()
    with tempfile.TemporaryDirectory(prefix="outboxd-apt-") as scratch:
        apt = _PrivateApt(Path(scratch))
        while True:
            try:
                apt.update(sources.pop(0))
                break
            except Failure:
                # Another vendor's entry can look like Debian's until asked for the suite.
                if not sources:
                    raise
        for archive in apt.download(names):
            run(["dpkg", "--extract", archive, folder], log=apt.log)


class _PrivateApt:
    def __init__(self, root: Path):
        self.root = root
        self.log = root / "apt.log"
        self.sources = root / "sources"
        self.archives = root / "cache/archives"
        for part in (self.sources, self.archives / "partial", root / "state/lists/partial"):
            part.mkdir(parents=True)
        (root / "status").touch()
        # Read after the machine's own settings, of which it undoes what would
        # act on the system or choose among releases.
        (root / "apt.conf").write_text(
            f"""
            #clear APT::Update::Pre-Invoke;
            #clear APT::Update::Post-Invoke;
            #clear APT::Update::Post-Invoke-Success;
            #clear APT::Default-Release;
            Dir::State "{root}/state";
            Dir::State::status "{root}/status";
            Dir::Cache "{root}/cache";
            Dir::Etc::sourcelist "/dev/null";
            Dir::Etc::sourceparts "{self.sources}";
            Dir::Etc::preferences "/dev/null";
            Dir::Etc::preferencesparts "/dev/null";
            Dir::Log "{root}";
            APT::Sandbox::User "root";
            APT::Update::Error-Mode "any";
            Acquire::Languages "none";
            Acquire::Retries "3";
            """
        )

    def update(self, source: str) -> None:
        (self.sources / f"{SUITE}.sources").write_text(source)
        self._get("update")

    def download(self, names: list[str]) -> list[Path]:
        self._get("--yes", "--download-only", "--no-install-recommends", "install", *names)
        return sorted(self.archives.glob("*.deb"))

    def _get(self, *arguments: str) -> None:
        run(["apt-get", "--config-file", self.root / "apt.conf", "--quiet", *arguments], log=self.log)


def machine_sources(etc: Path = Path("/etc")) -> list[str]:
    """The machine's entries for Debian with our suite in place of theirs, as
    stanzas of a .sources file; the likeliest first."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', _text(etc / "os-release"), re.MULTILINE))
    known = RELEASES | {release.get("VERSION_CODENAME", SUITE)}
    apt = etc / "apt"
    found = [
        stanza
        for file in sorted((apt / "sources.list.d").glob("*.sources"))
        for stanza in map(_fields, re.split(r"\n[ \t]*\n", _text(file)))
    ] + [
        stanza
        for file in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))]
        for stanza in map(_one_line, _text(file).splitlines())
    ]
    sources = []
    for stanza in found:
        if (
            "deb" in stanza.get("types", "").split()
            and "main" in stanza.get("components", "").split()
            and known.intersection(stanza.get("suites", "").split())
            and stanza.get("enabled", "yes").strip().lower() not in ("no", "false", "0", "off")
        ):
            lines = ["Types: deb", f"URIs: {stanza['uris'].strip()}", f"Suites: {SUITE}", "Components: main"]
            for name in ("signed-by", "trusted"):
                if name in stanza:
                    lines.append(f"{name.title()}:{stanza[name]}")
            source = "\n".join(lines) + "\n"
            if source not in sources:
                sources.append(source)
    if release.get("ID") != "debian" or not sources:
        raise Failure(
            "MySQL and RabbitMQ are taken from Debian's packages, and this machine has no apt source for Debian: "
            "run the tests on Debian, for example in a container"
        )
    return sources


def _fields(stanza: str) -> dict[str, str]:
    """A .sources stanza by lower-case field names; a field that is continued
    on further lines, as an embedded key is, keeps them."""
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t") and name:
            fields[name] += "\n" + line
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value
    return fields


def _one_line(line: str) -> dict[str, str]:
    """A line of a .list file, by the names that the fields have in a .sources file."""
    parts = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line)
    if not parts:
        return {}
    options, uris, suites, components = parts.groups()
    fields = {"types": "deb", "uris": uris, "suites": suites, "components": components}
    for option in (options or "").split():
        name, _, value = option.partition("=")
        fields[name.lower()] = " " + value.replace(",", " ")
    return fields


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
