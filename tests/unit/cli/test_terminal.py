"""The command line on a terminal: questions before data is lost, and progress on standard error only."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

import flagstone
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow

MAIN = [sys.executable, "-c", "from flagstone.cli.main import main; main()"]


def on_terminal(*arguments: str, answer: str = "") -> tuple[int, str, str]:
    """Run with a terminal for standard input and error; returns exit code, output, and terminal text."""
    ours, theirs = pty.openpty()
    if answer:
        os.write(ours, answer.encode())
    with subprocess.Popen(
        [*MAIN, *arguments], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        output, _ = process.communicate(timeout=60)
    shown = b""
    try:
        while piece := os.read(ours, 65_536):
            shown += piece
    except OSError:
        pass  # Linux reports the end of a pseudo-terminal as an error
    os.close(ours)
    return process.returncode, output, shown.decode()


def test_restore_asks_first(shop: Flagstone) -> None:
    good = shop.json("create-checkpoint")["id"]
    shop.ok("delete", "user/1")

    code, _, shown = on_terminal("-p", str(shop.path), "restore", "--id", good, answer="n\n")
    assert code == 1
    assert "gives up what was written since" in shown
    assert "nothing was changed" in shown
    assert shop("get", "user/1").exit_code == 1

    code, output, _ = on_terminal("-p", str(shop.path), "restore", "--id", good, answer="y\n")
    assert code == 0
    assert f"has the state of checkpoint {good}" in output
    assert shop.ok("get", "user/1") == "name 1"


def test_delete_db_asks_first_and_says_how_many_objects(shop: Flagstone) -> None:
    files = sum(1 for file in shop.path.rglob("*") if file.is_file())
    code, _, shown = on_terminal("-p", str(shop.path), "delete-db", answer="n\n")
    assert code == 1
    assert f"this deletes shop in file://{shop.path.parent}: {files} objects" in shown
    assert shop.json("scan", "--count")["entries"] == 10

    assert on_terminal("-p", str(shop.path), "delete-db", answer="y\n")[0] == 0
    assert "no database" in shop.refused("stats")


def test_progress_is_shown_on_standard_error(cli: Flagstone) -> None:
    with flagstone.open(cli.path, settings=flagstone.Settings(compactor_options=None)) as database:
        for part in range(3):
            for number in range(3000):
                database.put(b"%d/%06d" % (part, number), os.urandom(200))
            database.flush()
    code, output, shown = on_terminal("-p", str(cli.path), "--json", "verify")
    assert code == 0
    assert json.loads(output)["ok"] is True
    assert "verifying" in shown
    assert "%" in shown
    assert "requests" in shown

    code, output, shown = on_terminal("-p", str(cli.path), "--json", "compact", "--full")
    assert code == 0
    assert len(json.loads(output)["jobs"]) == 1
    assert "compacting" in shown
    assert "\x1b[?25h" in shown.rpartition("\x1b[?25l")[2]


def test_a_value_is_shown_as_text_on_a_terminal(shop: Flagstone) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*MAIN, "-p", str(shop.path), "get", "--hex", "00ff"], stdout=theirs, check=True, timeout=60
    )
    os.close(theirs)
    assert done.returncode == 0
    assert os.read(ours, 100) == b"0x0102\r\n"
    os.close(ours)
