"""Output on narrow terminals: nothing is wider, and ids stay whole so that they can be copied."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def lines_at(columns: int, *arguments: str) -> list[str]:
    """The lines of a command on a terminal with so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    program = "from flagstone.cli.main import main; main()"
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**environment, "TERM": "xterm"},
        check=False,
    )
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    shown = b""
    try:
        while piece := os.read(ours, 65_536):
            shown += piece
    except OSError:
        pass  # Linux reports the end of a pseudo-terminal as an error
    os.close(ours)
    return [_CONTROL.sub("", line).rstrip() for line in shown.decode().splitlines()]


@pytest.mark.parametrize("columns", [40, 60])
def test_checkpoints_are_lists_with_whole_ids(shop: Flagstone, columns: int) -> None:
    made = shop.json("create-checkpoint", "--name", "before the great migration", "--lifetime", "7days")["id"]
    lines = lines_at(columns, "list-checkpoints", str(shop.path))
    assert max(map(len, lines)) <= columns
    assert lines[0] == made
    assert lines[-1].split(None, 1) == ["name", "before the great migration"]


@pytest.mark.parametrize("command", [("explain", "user/1"), ("read-manifest",), ("stats",)])
def test_other_tables_fit_too(shop: Flagstone, command: tuple[str, ...]) -> None:
    lines = lines_at(50, "-p", str(shop.path), *command)
    titled = [line for line in lines if not line.startswith("shop in file://")]
    assert max(map(len, titled)) <= 50
    sst = shop.json("read-manifest")["l0"][0]["sst"]["id"]
    assert command == ("stats",) or sst in "\n".join(lines)


def test_a_wide_terminal_has_a_table(shop: Flagstone) -> None:
    shop.ok("create-checkpoint", "--name", "nightly")
    lines = lines_at(120, "list-checkpoints", str(shop.path))
    assert lines[0].split() == ["checkpoint", "manifest", "created", "expires", "name"]
    assert len(lines) == 2
