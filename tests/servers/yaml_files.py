"""YAML files, read by a package in a Python environment of its own."""

import json
import subprocess
import sys
from pathlib import Path

from . import packages
from .failure import Failure
from .process import run

PYYAML = "pyyaml==6.0.2"


def read(file: Path) -> dict:
    """The content of a file that holds one document."""

    def make(folder: Path) -> None:
        log = folder / "install.log"
        run([sys.executable, "-m", "venv", folder], log=log)
        run([folder / "bin/python", "-m", "pip", "install", "--quiet", PYYAML], log=log)

    reader = packages.cached(f"yaml-python-{sys.version_info.major}.{sys.version_info.minor}", make)
    ended = subprocess.run(
        [reader / "bin/python", "-c", "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"],
        input=file.read_text(),
        capture_output=True,
        text=True,
    )
    if ended.returncode != 0:
        raise Failure(f"{file.name} is not YAML:\n{ended.stderr}")
    return json.loads(ended.stdout)
