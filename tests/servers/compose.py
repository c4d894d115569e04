"""The servers as Docker containers, by the repository's docker-compose.yml; and
what can be said of compose.playground.yml without an engine to start it."""

import re
import subprocess
import sys
from pathlib import Path

from . import tools, yaml_files
from .failure import Failure
from .server import Server, environment

# What there is to see in the playground.
PLAYGROUND = {"postgres", "mysql", "mongodb", "kafka", "outboxd", "prometheus", "grafana"}


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
        services = yaml_files.read(self.file).get("services", {})
        if set(services) != {server.name for server in servers}:
            problems.append(f"its services are {sorted(services)}, not those in tests/servers/__init__.py")
        for server in servers:
            service = services.get(server.name, {})
            if service.get("image") != server.image:
                problems.append(f"{server.name}: the image is {service.get('image')}, not {server.image}")
            if not service.get("healthcheck", {}).get("test"):
                problems.append(f"{server.name}: no healthcheck")
            ports = service.get("ports", [])
            if not ports:
                problems.append(f"{server.name}: its ports must be published")
            if f"${{{server.port_variables[0]}:-" not in "".join(map(str, ports)):
                problems.append(f"{server.name}: no port follows {server.port_variables[0]}")
        problems += self._problems_of_any(services)
        # Docker Compose puts an empty string for a variable that is not set.
        for name in re.findall(r"(?<!\$)\$\{(\w+)\}", self.file.read_text()):
            problems.append(f"${{{name}}} has no default")
        _judge(self.file, problems)

    def validate_playground(self, servers: list[Server]) -> None:
        """Raises unless the playground has all that it promises, of the versions that are tested."""
        file = self.repository / "compose.playground.yml"
        services = yaml_files.read(file).get("services", {})
        problems = [f"there is no {name}" for name in sorted(PLAYGROUND - set(services))]
        tested = {server.image.partition(":")[0]: server.image for server in servers if server.name != "postgres-old"}
        for name, service in services.items():
            image = service.get("image", "")
            if ":" not in image or image.endswith(":latest"):
                problems.append(f"{name}: the image `{image}` has no version")
            if image != tested.get(image.partition(":")[0], image):
                problems.append(f"{name}: the image is {image}, and {tested[image.partition(':')[0]]} is what is tested")
        problems += self._problems_of_any(services)
        _judge(file, problems)

    def _problems_of_any(self, services: dict) -> list[str]:
        problems = []
        for name, service in services.items():
            if not all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])):
                problems.append(f"{name}: its ports must be published on 127.0.0.1 only")
            for volume in service.get("volumes", []):
                source = str(volume).split(":")[0]
                if source.startswith("./") and not (self.repository / source).exists():
                    problems.append(f"{name}: {source} is mounted and does not exist")
        return problems


def _judge(file: Path, problems: list[str]) -> None:
    """Raises if there are problems, or if Docker Compose finds one."""
    if problems:
        raise Failure(f"{file.name} is not right:\n  " + "\n  ".join(problems))
    # It reads and resolves the file without an engine.
    ended = subprocess.run(
        [tools.tool("docker-compose"), "--file", file, "config", "--quiet"], capture_output=True, text=True
    )
    if ended.returncode != 0:
        raise Failure(f"docker compose refuses {file.name}:\n{ended.stderr}")


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
