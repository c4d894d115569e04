"""What `tests/services up` started, so that later commands find it again.

There is one run folder per user and clone, so that two clones on a machine
have servers of their own. It lies under /tmp rather than in the clone or in
the user's runtime folder: PostgreSQL, run as an unprivileged user, must be
able to reach it, and a Unix socket's path may have 107 bytes at most.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .failure import Failure
from .process import Process


@dataclass
class Record:
    """How one server was obtained."""

    # "given" (an address in the environment), "docker" or "package".
    how: str
    address: str
    ports: dict[str, int] = field(default_factory=dict)
    process: Process | None = None


class RunFolder:
    def __init__(self, repository: Path):
        clone = hashlib.sha256(str(repository).encode()).hexdigest()[:8]
        self.path = Path("/tmp") / f"outboxd-services-{os.getuid()}-{clone}"
        self._file = self.path / "state.json"

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    def read(self) -> dict[str, Record]:
        try:
            stored = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        for entry in stored.values():
            if entry["process"] is not None:
                entry["process"] = Process(**entry["process"])
        return {name: Record(**entry) for name, entry in stored.items()}

    def write(self, records: dict[str, Record]) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({name: asdict(record) for name, record in records.items()}, indent=2))
        draft.rename(self._file)

    def remove(self, part: Path) -> None:
        """Deletes a server's folder, or with `path` the run folder itself."""
        deadline = time.monotonic() + 20
        while part.exists():
            try:
                shutil.rmtree(part)
            except OSError:
                # The children of a killed server may still write for a moment.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    @contextlib.contextmanager
    def locked(self):
        """Keeps other `up` and `down` commands of the same clone out."""
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
                raise Failure(f"{self.path} belongs to someone else: delete it and try again")
            self.path.chmod(0o755)
            folder = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another tests/services to finish", file=sys.stderr)
                fcntl.flock(folder, fcntl.LOCK_EX)
            # A `down` that we waited for has deleted the folder that we hold.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(folder), self.path.stat()):
                    break
            os.close(folder)
        try:
            yield
        finally:
            os.close(folder)
