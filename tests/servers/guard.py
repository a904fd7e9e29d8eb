"""Runs one server and ends it with the test run: `guard.py WATCHED_PID FOLDER COMMAND...`.

The guard stops the server's process group and removes FOLDER when the guard gets SIGTERM, when the watched
process (the test run) has ended in any way, or when the server itself exits.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.1
PATIENCE_S = 8.0


def main() -> int:
    watched, folder, command = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    with (folder / "log").open("ab") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        while server.poll() is None and not stopping and alive(watched):
            time.sleep(POLL_S)
    finally:
        _stop(server)
        if stopping or not alive(watched):
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def alive(pid: int) -> bool:
    """Whether a process of that id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stop(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            continue
        # The leader has ended; children that ignored the signal get the next one.
    server.wait()


if __name__ == "__main__":
    sys.exit(main())
