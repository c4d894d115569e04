"""The programs that are measured and the private servers that they are measured on.

The servers are those of the tests, from the same packages, on ports and in a folder of their own: a bench neither
disturbs `tests/services` nor is disturbed by what tests left there. Whatever was started is stopped, and its data
deleted, when the stage ends.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from servers import certificates
from servers.failure import Failure
from servers.kafka import Kafka
from servers.postgres import Postgres
from servers.process import Process, tail
from servers.server import Place, Server, free_ports

READY_DEADLINE = 120


class BenchPostgres(Postgres):
    # Defaults otherwise, so that it is a server such as people have; only what would make runs differ is out of the
    # way: no checkpoint falls into one, and no autovacuum of a table just loaded.
    settings = {
        "shared_buffers": "256MB",
        "max_wal_size": "32GB",
        "checkpoint_timeout": "1h",
        "autovacuum": "off",
    }

    def __init__(self):
        super().__init__("postgres", "18.6", certificate="localhost")


class BenchKafka(Kafka):
    # The tests' broker is made to start fast; this one has the compiler that a broker in production has.
    jvm = ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"]


class Stage:
    def __init__(self, repository: Path):
        self.repository = repository
        self.folder = Path()
        self._started: list[tuple[Server, Process]] = []
        self.outboxd = Path()
        self.instruments = Path()

    def __enter__(self) -> "Stage":
        # PostgreSQL runs as another user and must be able to reach it.
        self.folder = Path(tempfile.mkdtemp(prefix="outboxd-bench-", dir="/tmp"))
        self.folder.chmod(0o755)
        return self

    def __exit__(self, *_) -> None:
        for server, process in reversed(self._started):
            process.stop(server.stop_signal)
        shutil.rmtree(self.folder, ignore_errors=True)

    def build(self) -> None:
        """Builds what is measured and what measures."""
        say("building outboxd and the instruments")
        # One after the other: together they would share the features of the development dependencies, and outboxd
        # would not be the program that users run.
        for target in (["--bin", "outboxd"], ["--example", "measure"]):
            command = ["cargo", "build", "--release", "--locked", "--quiet", *target]
            if subprocess.run(command, cwd=self.repository).returncode != 0:
                raise Failure(f"`{' '.join(command)}` failed")
        told = subprocess.run(
            ["cargo", "metadata", "--no-deps", "--format-version=1"],
            cwd=self.repository,
            capture_output=True,
            text=True,
        )
        release = Path(json.loads(told.stdout)["target_directory"]) / "release"
        self.instruments = release / "examples" / "measure"
        # A copy: someone may build while we measure.
        self.outboxd = Path(shutil.copy2(release / "outboxd", self.folder / "outboxd"))

    def start(self, server: Server) -> tuple[str, Process]:
        """Starts a server and waits until it answers; returns its address."""
        server.fetch()
        certificates.make(self.folder / "certificates")
        place = Place(
            self.folder / server.name, free_ports(server.port_variables, wished={}), self.folder / "certificates"
        )
        place.folder.mkdir()
        place.folder.chmod(0o755)
        address = server.address(place.ports)
        say(f"starting {server.title} at {address}")
        process = server.start(place)
        self._started.append((server, process))
        server.set_up(place, process)
        deadline = time.monotonic() + READY_DEADLINE
        while not server.answers(address):
            if not process.alive() or time.monotonic() > deadline:
                raise Failure(f"{server.title} does not answer.\n{tail(place.log)}")
            time.sleep(0.1)
        return address, process

    def build_peer(self, name: str) -> Path | None:
        """Builds another's client, bench/peers/NAME, where there is Go to do it with."""
        if not shutil.which("go"):
            say(f"no Go here: {name} is left out")
            return None
        program = self.folder / name
        command = ["go", "build", "-o", str(program), "."]
        if subprocess.run(command, cwd=self.repository / "bench/peers" / name).returncode != 0:
            raise Failure(f"`{' '.join(command)}` failed in bench/peers/{name}")
        return program

    def run(self, *words: object) -> None:
        """Runs a program to its end."""
        if subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode != 0:
            raise Failure(f"`{' '.join(map(str, words))}` failed")

    def measure(self, instrument: str, *arguments: object):
        """Runs an instrument and returns what it printed."""
        return self.told(self.instruments, instrument, *arguments)

    def told(self, *words: object):
        """Runs a program that prints JSON, and returns that."""
        words = [str(word) for word in words]
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if ended.returncode != 0:
            raise Failure(f"`{' '.join(words)}` failed")
        return json.loads(ended.stdout)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
