"""The command line as a process: signals, pipes, and stores that do not answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flagstone as database
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow

MAIN = [sys.executable, "-c", "from flagstone.cli.main import main; main()"]
SECRET = "wJalrXUtnFEMIK7MDENG"


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "HTTP"))
    }
    return {**kept, **more}


def reaching(endpoint: str) -> dict[str, str]:
    return environment(
        AWS_ENDPOINT=endpoint,
        AWS_ACCESS_KEY_ID="AKIAIOSFODNN7EXAMPLE",
        AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_REGION="us-east-1",
        AWS_ALLOW_HTTP="true",
    )


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that accepts no connection, because its queue of connections is full."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        waiting = []
        for _ in range(4):
            connecting = socket.socket()
            connecting.setblocking(False)
            connecting.connect_ex(("127.0.0.1", port))
            waiting.append(connecting)
        yield f"http://127.0.0.1:{port}"
        for connecting in waiting:
            connecting.close()


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = subprocess.run(
        [*MAIN, *arguments], capture_output=True, text=True, timeout=60, check=False, env=env or environment()
    )
    return done, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("command", [("read-manifest",), ("verify",), ("put", "k", "v"), ("compact",)])
def test_a_command_fails_within_seconds_if_the_server_does_not_answer(
    silent: str, command: tuple[str, ...]
) -> None:
    done, elapsed = run("--timeout", "1s", "-p", "s3://bucket/db", *command, env=reaching(silent))
    assert done.returncode == 5
    assert done.stderr.startswith("flagstone: ")
    assert "s3://bucket" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert SECRET not in done.stderr
    assert elapsed < 10


@pytest.mark.slow
def test_a_command_fails_within_seconds_if_no_connection_is_accepted(black_hole: str) -> None:
    done, elapsed = run("--timeout", "2s", "-p", "s3://bucket/db", "stats", env=reaching(black_hole))
    assert done.returncode == 5, done.stderr
    assert elapsed < 12


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no.such.host.invalid"])
def test_an_unreachable_endpoint_exits_with_unavailable(endpoint: str) -> None:
    done, elapsed = run("--timeout", "1s", "-p", "s3://bucket/db", "stats", env=reaching(endpoint))
    assert done.returncode == 5, done.stderr
    assert elapsed < 10


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts the command line in a process; ends processes that a failed test leaves running."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*MAIN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env or environment(),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait(timeout=30)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.slow
def test_ctrl_c_ends_a_command_that_waits_for_the_store(started: Start) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process = started("--timeout", "50s", "-p", "s3://bucket/db", "stats", env=reaching(endpoint))
        listening.settimeout(20)
        with listening.accept()[0]:
            process.send_signal(signal.SIGINT)
            before = time.monotonic()
            _, errors = process.communicate(timeout=20)

    assert process.returncode == 130
    assert time.monotonic() - before < 8
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("schedule-garbage-collection", "--wal", "min_age=1h,period=1h"),
        ("run-compactor",),
        ("run-worker",),
        ("inspect",),
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_service_ends_without_a_traceback_after_a_signal(
    shop: Flagstone, started: Start, command: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    process = started("-p", str(shop.path), *command)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "started" in first, first

    process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == code, errors
    assert "Traceback" not in errors
    with database.open_reader(shop.path, mode="latest") as reader:
        assert len(list(reader.scan())) == 10


@pytest.mark.slow
def test_a_compactor_does_a_submitted_job(shop: Flagstone, started: Start) -> None:
    shop.ok("compact", "--full")
    shop.ok("put", "user/9", "name 9")
    job = shop.json("submit-compaction", "--request", '"Full"')[0]["id"]
    process = started("-p", str(shop.path), "run-compactor")

    deadline = time.monotonic() + 60
    while shop.json("read-compaction", "--id", job)["status"] != "Completed" and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 0, errors
    assert shop.json("read-compaction", "--id", job)["status"] == "Completed", errors
    assert shop.json("scan", "--count")["entries"] == 11


@pytest.mark.slow
def test_a_compactor_uses_the_policy_of_the_settings_file(
    shop: Flagstone, started: Start, tmp_path: Path
) -> None:
    settings = tmp_path / "lazy.toml"
    lazy = 'compaction_policy = "lazy-leveling"\nmin_compaction_sources = "2"\n'
    settings.write_text(f"[compactor_options.scheduler_options]\n{lazy}")
    admin = database.Admin(shop.path)
    process = started("-p", str(shop.path), "--settings", str(settings), "run-compactor")
    assert process.stderr is not None
    assert "started" in process.stderr.readline()

    # With two runs of one size, size-tiered compaction waits: here they are enough for the last run.
    with database.open(shop.path, settings={"compactor_options": None}) as db:
        for number in range(6):
            db.put(b"later/%d" % number, b"1")
            db.flush()
    deadline = time.monotonic() + 60
    while len(admin.manifest().value.tree.l0) > 1 or len(admin.manifest().value.tree.runs) > 1:
        assert time.monotonic() < deadline, admin.manifest().value.tree
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert shop.json("scan", "--count")["entries"] == 16


def test_a_scan_ends_without_a_message_if_its_output_pipe_is_closed(cli: Flagstone, started: Start) -> None:
    with database.open(cli.path) as opened:
        for number in range(20_000):
            opened.put(b"%08d" % number, b"v" * 20)
    process = started("-p", str(cli.path), "scan")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == f"00000000\t{'v' * 20}\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 141


def test_json_output_is_valid_in_every_locale(cli: Flagstone) -> None:
    cli.ok("put", "--create", "Müller", "größer")
    done, _ = run("-p", str(cli.path), "--json", "get", "Müller", env=environment(PYTHONIOENCODING="ascii"))
    assert json.loads(done.stdout)["value"] == "größer"


def test_characters_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    done, _ = run("-p", str(tmp_path / "nö"), "stats", env=environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 2
    assert "n\\xf6" in done.stderr


@pytest.mark.parametrize("command", [("--help",), ("scan", "--help"), ("stats",)])
def test_a_failed_write_to_standard_output_prints_no_traceback(
    shop: Flagstone, command: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*MAIN, "-p", str(shop.path), *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_an_internal_error_is_one_line_and_a_traceback_on_request() -> None:
    code = (
        "import flagstone.inspector.snapshot as snapshot, flagstone.cli.main as main\n"
        "snapshot.take_snapshot = lambda *_: 1 / 0\n"
        "main.main()"
    )
    command = [sys.executable, "-c", code, "-p", "/tmp/x", "stats"]
    quiet = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert quiet.returncode == 70
    assert quiet.stderr.startswith("flagstone: ZeroDivisionError")
    assert len(quiet.stderr.splitlines()) == 1
    loud = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(FLAGSTONE_TRACEBACK="1"),
    )
    assert "Traceback" in loud.stderr
