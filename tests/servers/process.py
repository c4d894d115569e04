"""Server processes that outlive the command that started them.

A process is remembered by its id together with the moment it started: an id
alone may belong to someone else by the time `tests/services down` reads it
back, and nothing that is not ours may be signalled.
"""

import os
import pwd
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from .failure import Failure

STOP_DEADLINE = 30


@dataclass(frozen=True)
class Process:
    pid: int
    started: str

    def alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def stop(self, first_signal: signal.Signals) -> None:
        """Asks with `first_signal`, and kills what has not heeded it in time."""
        for number, patience in ((first_signal, STOP_DEADLINE), (signal.SIGKILL, STOP_DEADLINE)):
            if not self.alive():
                return
            os.kill(self.pid, number)
            deadline = time.monotonic() + patience
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.05)
        if self.alive():
            raise Failure(f"process {self.pid} survives SIGKILL; look at what it waits for in /proc/{self.pid}/stack")


def spawn(
    command: list, *, log: Path, env: dict | None = None, user: str | None = None, cwd: Path | None = None
) -> Process:
    """Starts a server in a session of its own, so that neither the end of this
    command nor a Ctrl-C in its terminal reaches the server."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
            **as_user(user),
        )
    started = _start_time(child.pid)
    if started is None:
        raise Failure(f"{command[0]} ended at once.\n{tail(log)}")
    return Process(child.pid, started)


def run(command: list, *, log: Path, user: str | None = None, env: dict | None = None, stdin: str = "") -> None:
    """Runs a command to its end, its output kept in `log` and shown only when it fails."""
    words = [str(word) for word in command]
    with log.open("ab") as output:
        try:
            ended = subprocess.run(
                words, input=stdin.encode(), stdout=output, stderr=subprocess.STDOUT, env=env, **as_user(user)
            )
        except FileNotFoundError as error:
            raise Failure(f"`{words[0]}` is not there: install it and try again") from error
    if ended.returncode != 0:
        raise Failure(f"`{' '.join(words)}` failed with status {ended.returncode}.\n{tail(log)}")


def unprivileged_user() -> str | None:
    """The user for servers that refuse to run as root; None where we are not root."""
    return "nobody" if os.geteuid() == 0 else None


def give_to(path: Path, user: str | None) -> None:
    if user is not None:
        account = pwd.getpwnam(user)
        os.chown(path, account.pw_uid, account.pw_gid)


def as_user(user: str | None) -> dict:
    """The arguments of `subprocess` that run a command as `user`."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def tail(log: Path, lines: int = 25) -> str:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return f"(no log at {log})"
    return f"The end of {log}:\n" + "\n".join("  " + line for line in text.splitlines()[-lines:])


def _start_time(pid: int) -> str | None:
    """When the process started, as the kernel counts it; None once it is gone.

    A zombie is gone: where process 1 does not reap orphans, a killed server
    stays in the process table for ever.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces.
    fields = stat.rpartition(")")[2].split()
    state, ticks_since_boot = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}/{ticks_since_boot}"
