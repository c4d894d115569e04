"""Measurements as JSON lines, and the table that sums them up."""

import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure over all runs, and what it should be."""

    title: str
    values: list[float | None]
    digits: int = 0
    at_least: float | None = None
    at_most: float | None = None

    def cells(self) -> tuple[str, str, str, str]:
        values = [value for value in self.values if value is not None]
        if not values:
            return self.title, "–", "", ""
        median = statistics.median(values)
        spread = " ".join(f"{value:,.{self.digits}f}" for value in values)
        return self.title, f"{median:,.{self.digits}f}", spread, self._verdict(median)

    def _verdict(self, median: float) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}  {'met' if median >= self.at_least else 'MISSED'}"
        if self.at_most is not None:
            return f"≤ {self.at_most:g}  {'met' if median <= self.at_most else 'MISSED'}"
        return ""


class Report:
    def __init__(self, name: str, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}.json"
        self._lines = self.path.open("w")

    def add(self, what: str, **measured) -> dict:
        """Prints and keeps one measurement."""
        line = {"measured": what, **{name: _rounded(value) for name, value in measured.items()}}
        text = json.dumps(line, ensure_ascii=False)
        print(text, flush=True)
        print(text, file=self._lines, flush=True)
        return measured

    def machine(self) -> dict:
        """What the figures depend on besides the program."""
        return {
            "cores": os.cpu_count(),
            "cpu": _cpu_model(),
            "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
            "kernel": platform.release(),
            "commit": _commit(),
            "load_average": os.getloadavg()[0],
        }

    def table(self, rows: list[Row]) -> None:
        cells = [("", "median", "all runs", "target"), *(row.cells() for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        print()
        for title, median, spread, verdict in cells:
            print(f"{title:<{widths[0]}}  {median:>{widths[1]}}  {spread:<{widths[2]}}  {verdict}".rstrip())
        print(f"\n{self.path}", flush=True)


def _rounded(value):
    if isinstance(value, float):
        return round(value, 4) if abs(value) < 1000 else round(value)
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _commit() -> str | None:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return told.stdout.strip() or None
