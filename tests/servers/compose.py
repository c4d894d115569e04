"""The servers as Docker containers, by the repository's docker-compose.yml."""

import json
import re
import subprocess
import sys
from pathlib import Path

from . import packages
from .failure import Failure
from .process import run
from .server import Server, environment

PYYAML = "pyyaml==6.0.2"


class Compose:
    def __init__(self, repository: Path, project: str):
        self.repository = repository
        self.file = repository / "docker-compose.yml"
        self.project = project

    def up(self, service: str, variables: dict[str, str]) -> None:
        """Starts one service; does not wait for it. The output is shown: pulling an image takes a while."""
        ended = subprocess.run(self._command("up", "--detach", service), env=environment(variables), stdout=sys.stderr)
        if ended.returncode != 0:
            raise Failure(
                f"docker compose could not start {service}; set OUTBOXD_SERVICES_FROM=packages to do without Docker"
            )

    def stop(self, service: str) -> None:
        subprocess.run(self._command("rm", "--stop", "--force", "--volumes", service), stdout=sys.stderr, check=True)

    def down(self) -> None:
        subprocess.run(self._command("down", "--volumes", "--remove-orphans"), stdout=sys.stderr, check=True)

    def logs(self, service: str) -> str:
        return subprocess.run(
            self._command("logs", "--tail", "25", service), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).stdout

    def _command(self, *arguments: str) -> list[str]:
        return ["docker", "compose", "--project-name", self.project, "--file", str(self.file), *arguments]

    def validate(self, servers: list[Server]) -> None:
        """Raises unless the file gives the servers that the packages give.

        Machines that test without Docker never start it; this keeps the file
        from falling behind there.
        """
        problems = []
        services = self._parsed().get("services", {})
        if set(services) != {server.name for server in servers}:
            problems.append(f"its services are {sorted(services)}, not those in tests/servers/__init__.py")
        for server in servers:
            service = services.get(server.name, {})
            if service.get("image") != server.image:
                problems.append(f"{server.name}: the image is {service.get('image')}, not {server.image}")
            if not service.get("healthcheck", {}).get("test"):
                problems.append(f"{server.name}: no healthcheck")
            ports = service.get("ports", [])
            if not ports or not all(str(port).startswith("127.0.0.1:") for port in ports):
                problems.append(f"{server.name}: its ports must be published, and on 127.0.0.1 only")
            if f"${{{server.port_variables[0]}:-" not in "".join(map(str, ports)):
                problems.append(f"{server.name}: no port follows {server.port_variables[0]}")
            for volume in service.get("volumes", []):
                source = str(volume).split(":")[0]
                if source.startswith("./") and not (self.repository / source).exists():
                    problems.append(f"{server.name}: {source} is mounted and does not exist")
        # Docker Compose puts an empty string for a variable that is not set.
        for name in re.findall(r"(?<!\$)\$\{(\w+)\}", self.file.read_text()):
            problems.append(f"${{{name}}} has no default")
        if problems:
            raise Failure(f"{self.file.name} is not right:\n  " + "\n  ".join(problems))
        if client_has_compose():
            ended = subprocess.run(self._command("config", "--quiet"), capture_output=True, text=True)
            if ended.returncode != 0:
                raise Failure(f"docker compose refuses {self.file.name}:\n{ended.stderr}")

    def _parsed(self) -> dict:
        """The file's content, by a YAML reader in a Python environment of its own."""

        def make(folder: Path) -> None:
            log = folder / "install.log"
            run([sys.executable, "-m", "venv", folder], log=log)
            run([folder / "bin/python", "-m", "pip", "install", "--quiet", PYYAML], log=log)

        reader = packages.cached(f"yaml-python-{sys.version_info.major}.{sys.version_info.minor}", make)
        ended = subprocess.run(
            [reader / "bin/python", "-c", "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"],
            input=self.file.read_text(),
            capture_output=True,
            text=True,
        )
        if ended.returncode != 0:
            raise Failure(f"{self.file.name} is not YAML:\n{ended.stderr}")
        return json.loads(ended.stdout)


def client_has_compose() -> bool:
    return _succeeds("docker", "compose", "version")


def engine_answers() -> bool:
    return _succeeds("docker", "info") and client_has_compose()


def _succeeds(*command: str) -> bool:
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
