"""One start of each server per test run, shared by all its pytest processes.

The first process that needs a server starts it and writes its address to a file, which the others read. Each server
runs under `guard.py`, which ends it with the run in any case. If a server cannot be started, the reason is
written to the file, and every test that depends on it is skipped with that reason.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from flagstone.runtime.clock import SYSTEM_CLOCK
from servers.guard import alive

GUARD = Path(__file__).with_name("guard.py")
STOP_PATIENCE_S = 30.0


class ServerMissingError(Exception):
    """This machine cannot run the server; the message says why."""


class Launched:
    """A server process under its guard, with its own folder."""

    def __init__(self, name: str, command: list[str], *, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"flagstone-{name}-"))
        self.folder.chmod(0o711)  # PostgreSQL runs as another user and needs access
        watched = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        self._guard = subprocess.Popen(
            [sys.executable, str(GUARD), str(watched), str(self.folder)]
            + [part.replace("{folder}", str(self.folder)) for part in command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _guards[self._guard.pid] = self._guard

    @property
    def pid(self) -> int:
        return self._guard.pid

    def wait_until(self, ready: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Return when `ready` is true, else stop the server and raise `ServerMissingError` with the end of its log."""
        deadline = SYSTEM_CLOCK.monotonic() + within_s
        while not ready():
            ended = self._guard.poll() is not None
            if ended or SYSTEM_CLOCK.monotonic() > deadline:
                log = self.folder / "log"
                words = log.read_text(errors="replace")[-500:].strip() if log.exists() else ""
                _stop(self._guard.pid)
                outcome = "ended at once" if ended else f"did not start within {within_s:.0f} s"
                raise ServerMissingError(f"{self.name} {outcome}: {words}")
            SYSTEM_CLOCK.sleep(0.05)


_guards: dict[int, subprocess.Popen[bytes]] = {}


def shared(
    registry: Path, name: str, start: Callable[[], tuple[int, dict[str, object]]]
) -> dict[str, object]:
    """The facts that clients need about the server `name`; starts the server at the first call of the run.

    `start` returns the process id of the guard and these facts.
    """
    registry.mkdir(parents=True, exist_ok=True)
    note = registry / f"{name}.json"
    with (registry / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists():
            try:
                pid, facts = start()
                started: dict[str, object] = {"pid": pid, "facts": facts}
            except ServerMissingError as reason:
                started = {"missing": str(reason)}
            note.write_text(json.dumps(started))
    known = json.loads(note.read_text())
    if "missing" in known:
        raise ServerMissingError(known["missing"])
    facts = known["facts"]
    assert isinstance(facts, dict)
    return facts


def note_used(registry: Path, name: str) -> None:
    """Record that the run uses a server inside a test process, which needs no stopping."""
    registry.mkdir(parents=True, exist_ok=True)
    (registry / f"{name}.json").write_text(json.dumps({"facts": {}}))


def summarize(registry: Path, known: dict[str, str]) -> str | None:
    """One line: the servers that tests ran against, and those that could not be started, with the reason.

    `known` are the titles of all servers by name. None if no test used a server.
    """
    # Other records are not of servers, such as the interpreter for the pages of the documentation.
    notes = {
        note.stem: json.loads(note.read_text()) for note in registry.glob("*.json") if note.stem in known
    }
    if not notes:
        return None
    used = [title for name, title in known.items() if "facts" in notes.get(name, {})]
    missing = [
        f"{title} ({' '.join(notes[name]['missing'].split())[:160]})"
        for name, title in known.items()
        if "missing" in notes.get(name, {})
    ]
    unasked = [title for name, title in known.items() if name not in notes]
    return (
        f"servers: ran against {', '.join(used) or 'none'}; skipped {', '.join(missing) or 'none'}"
        f"{'; not asked for: ' + ', '.join(unasked) if unasked else ''}"
    )


def stop_all(registry: Path) -> None:
    """Stop every server of this run and wait until they have ended."""
    notes = sorted(registry.glob("*.json"))
    pids = [known["pid"] for known in (json.loads(note.read_text()) for note in notes) if "pid" in known]
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGTERM)
    for pid in pids:
        _stop(pid)
    for note in notes:
        note.unlink()


def _stop(pid: int) -> None:
    guard = _guards.pop(pid, None)
    if guard is not None:
        guard.terminate()
        guard.wait(STOP_PATIENCE_S)
        return
    deadline = SYSTEM_CLOCK.monotonic() + STOP_PATIENCE_S
    while alive(pid) and SYSTEM_CLOCK.monotonic() < deadline:
        SYSTEM_CLOCK.sleep(0.05)


def free_port() -> int:
    """A free port. Another process may take it before the server does; then the start fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
