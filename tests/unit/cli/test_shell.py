"""`shell`: scripts from standard input, and a conversation at a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import flagstone
from flagstone.errors import InvalidRequest
from unit.cli.running import Flagstone


@pytest.fixture
def script(shop: Flagstone) -> Callable[..., str]:
    def run(*lines: str, options: tuple[str, ...] = ()) -> str:
        return shop.ok("shell", *options, stdin="".join(f"{line}\n" for line in lines).encode())

    return run


def test_a_script_reads(script: Callable[..., str]) -> None:
    assert script("get user/1", "# a comment", "", "scan user/ 2", "get nobody") == (
        "name 1\nuser/0\tname 0\nuser/1\tname 1\n(no value)\n"
    )
    assert script("get 0x00ff", "exit", "get user/1") == "0x0102\n"


def test_a_script_writes_only_if_that_is_allowed(shop: Flagstone, script: Callable[..., str]) -> None:
    done = shop("shell", stdin=b"get user/1\nput user/1 changed\nget user/1\n")
    assert (done.exit_code, done.stdout) == (2, "name 1\n")
    assert "start it with --write" in done.stderr
    written = script(
        "put user/1 'a new name'",
        "get user/1",
        "put 0x01 0xff 1h",
        "delete user/2",
        "get user/2",
        options=("--write",),
    )
    assert written.splitlines()[1::3] == ["a new name", "(no value)"]
    assert shop.ok("get", "user/1") == "a new name"
    assert shop.json("get", "--hex", "01")["expires_ms"] is not None


def test_a_script_can_go_back_in_time(shop: Flagstone, script: Callable[..., str]) -> None:
    seq = shop.json("get", "user/1")["seq"]
    last = max(row["seq"] for row in map(json.loads, shop.ok("--json", "scan").splitlines()))
    shop.ok("create-checkpoint")
    shop.ok("put", "user/1", "changed")
    shown = script("get user/1", f"as-of {last}", "get user/1", "as-of", "get user/1", "as-of 0s ago")
    assert shown.splitlines() == [
        "changed",
        f"showing {last}",
        "name 1",
        "showing the present",
        "changed",
        "showing 0s ago",
    ]
    refused = shop("shell", "--write", stdin=f"as-of {last}\nput a b\n".encode())
    assert "a former state, which cannot change" in refused.stderr
    assert seq > 0


def test_every_command_prints_json_lines(script: Callable[..., str]) -> None:
    lines = script(
        "get user/1",
        "get nobody",
        "scan user/ 1",
        "put a b",
        "delete a",
        "refresh",
        "explain user/1",
        "stats",
        "help",
        "as-of",
        options=("--json", "--write"),
    ).splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 10
    assert found[0]["value"] == "name 1"
    assert found[1] is None
    assert found[6]["row"]["key"] == "user/1"
    assert found[7]["open"] == "for writing"
    assert "get KEY" in found[8]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fetch a", "there is no command 'fetch'; there are get, scan"),
        ("get", "write get KEY"),
        ("get a b", "write get KEY"),
        ("scan a many", "is not a number"),
        ("get 'a", "cannot read"),
        ("get 0xzz", "is not hexadecimal"),
        ("as-of soon", "is not a time"),
        ("put a b soon", "is not a duration"),
    ],
)
def test_a_line_that_is_wrong_ends_a_script_with_what_to_write(
    shop: Flagstone, line: str, words: str
) -> None:
    done = shop("shell", "--write", stdin=f"{line}\nget user/1\n".encode())
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_database_that_does_not_exist_is_refused(cli: Flagstone) -> None:
    assert "no database" in cli("shell", stdin=b"get a\n").stderr


def test_completion_offers_commands_and_keys(shop: Flagstone) -> None:
    from flagstone.cli.connection import connect
    from flagstone.cli.context import Invocation
    from flagstone.cli.shell import Session, _Completer

    class Line:
        """The part of readline that the completer asks."""

        text = ""

        def get_line_buffer(self) -> str:
            return self.text

        def get_begidx(self) -> int:
            return self.text.rfind(" ") + 1

    call, line = Invocation(path=str(shop.path)), Line()
    with Session(call, connect(call), merge_operator=None, writes=False) as session:
        completer = _Completer(session, line)

        def offered(text: str) -> list[str]:
            line.text = text
            word, found = text[line.get_begidx() :], []
            while (each := completer.complete(word, len(found))) is not None:
                found.append(each)
            return found

        assert offered("s") == ["scan ", "stats "]
        assert offered("get user/1") == ["user/1"]
        assert len(offered("get user/")) == 9
        assert offered("get user/1 x") == []
        with pytest.raises(InvalidRequest):
            session.run("nonsense")


@pytest.mark.slow
def test_at_a_terminal_errors_do_not_end_it_and_the_history_is_private(
    shop: Flagstone, tmp_path: Path
) -> None:
    history = tmp_path / "state" / "history"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", "from flagstone.cli.main import main; main()", "shell", str(shop.path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "FLAGSTONE_HISTORY": str(history), "TERM": "dumb"},
    ) as process:
        os.close(theirs)
        os.write(ours, b"nonsense\nget user/1\nexit\n")
        shown = b""
        try:
            while piece := os.read(ours, 65_536):
                shown += piece
        except OSError:
            pass  # Linux reports the end of a pseudo-terminal as an error
        assert process.wait(timeout=30) == 0
    os.close(ours)
    text = shown.decode()
    assert "there is no command 'nonsense'" in text
    assert "name 1" in text.partition("no command")[2]
    assert "get user/1" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.slow
def test_ctrl_c_gives_up_the_line_and_not_the_shell(shop: Flagstone) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", "from flagstone.cli.main import main; main()", "shell", str(shop.path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "FLAGSTONE_HISTORY": "", "TERM": "dumb"},
    ) as process:
        os.close(theirs)

        def read_until(words: bytes) -> None:
            shown = b""
            while words not in shown:
                shown += os.read(ours, 65_536)

        read_until(b"flagstone> ")
        process.send_signal(signal.SIGINT)
        read_until(b"flagstone> ")
        os.write(ours, b"get user/1\n")
        read_until(b"name 1")
        os.write(ours, b"exit\n")
        assert process.wait(timeout=30) == 0
    os.close(ours)


@pytest.mark.slow
def test_ctrl_c_gives_up_a_command_and_not_the_shell(shop: Flagstone) -> None:
    with flagstone.open(shop.path) as db:
        db.update((b"many/%06d" % number, b"v" * 50) for number in range(100_000))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", "from flagstone.cli.main import main; main()", "shell", str(shop.path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "FLAGSTONE_HISTORY": "", "TERM": "dumb"},
    ) as process:
        os.close(theirs)

        def read_until(words: bytes) -> bytes:
            shown = b""
            while words not in shown:
                shown += os.read(ours, 65_536)
            return shown

        read_until(b"flagstone> ")
        os.write(ours, b"scan many/ 100000\n")
        read_until(b"many/000100")
        process.send_signal(signal.SIGINT)
        assert b"many/099999" not in read_until(b"interrupted")
        read_until(b"flagstone> ")
        time.sleep(1.5)  # longer than the grace after which an interrupted process is ended
        os.write(ours, b"get user/1\n")
        read_until(b"name 1")
        os.write(ours, b"exit\n")
        assert process.wait(timeout=30) == 0
    os.close(ours)
