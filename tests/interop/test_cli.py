"""The command line and the official wheel report the same facts and use each other's databases."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flagstone.cli.main import app
from golden.corpus import GoldenDatabase, databases, every_database
from kit.fixtures import Wheel

pytestmark = pytest.mark.slow


def cli(database: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["--path", str(database), *arguments])
    assert done.exit_code == 0, f"{arguments}: {done.stderr} {done.exception}"
    return str(done.stdout)


def cli_json(database: Path, *arguments: str) -> Any:
    return json.loads(cli(database, *arguments, "--json"))


def assert_superset(ours: Any, theirs: Any, path: str = "") -> None:
    """Assert that every field of the wheel is in ours with the same value; bytes are text or 0x… in ours."""
    match theirs:
        case dict():
            for name, value in theirs.items():
                assert name in ours, f"{path}.{name} is missing"
                if name == "bytes_processed":
                    # The wheel does not store it and always prints 0; we print the size of the job's output.
                    assert ours[name] >= value
                    continue
                assert_superset(ours[name], value, f"{path}.{name}")
        case list():
            assert len(ours) == len(theirs), path
            for position, (our, their) in enumerate(zip(ours, theirs, strict=True)):
                assert_superset(our, their, f"{path}[{position}]")
        case ("enum", str(name)):
            assert ours.upper() == name.replace("_", ""), path
        case bytes():
            data = bytes.fromhex(ours[2:]) if ours.startswith("0x") else ours.encode()
            assert data == theirs, path
        case _:
            assert ours == theirs, path


@every_database
def test_read_manifest_and_read_compactions_print_every_field_that_the_wheel_reads(
    wheel: Wheel, tmp_path: Path, database: GoldenDatabase
) -> None:
    # A copy, because the wheel may write during a read.
    store = tmp_path / "store"
    shutil.copytree(database.store, store)
    path = store / database.path
    theirs = wheel.read_metadata(str(store), database.path)

    assert_superset(cli_json(path, "read-manifest"), theirs["manifest"])
    assert_superset(cli_json(path, "list-manifests"), theirs["manifests"])
    assert_superset(cli_json(path, "list-checkpoints"), theirs["checkpoints"])
    assert_superset(cli_json(path, "list-compactions"), theirs["all_compactions"])
    if theirs["compactions"] is not None:
        assert_superset(cli_json(path, "read-compactions"), theirs["compactions"])
        for job in theirs["compactions"]["recent_compactions"]:
            assert_superset(cli_json(path, "read-compaction", "--id", job["id"]), job)


def test_the_wheel_reads_what_the_command_line_wrote(wheel: Wheel, tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    cli(shop, "put", "--create", "a", "1")
    cli(shop, "put", "b", "2")
    cli(shop, "put", "c", "3")
    cli(shop, "delete", "b")
    checkpoint = cli_json(shop, "create-checkpoint", "--name", "here")["id"]
    cli(shop, "put", "--hex", "00ff", "0001", "--value-form", "hex")
    assert wheel.scan(str(tmp_path), "shop") == {b"\x00\xff": b"\x00\x01", b"a": b"1", b"c": b"3"}
    assert wheel.scan(str(tmp_path), "shop", checkpoint=checkpoint) == {b"a": b"1", b"c": b"3"}

    cli(shop, "compact", "--full")
    cli(shop, "run-garbage-collection", "--min-age", "0s")
    cli(shop, "clone", "copy", "--prefix", "a")
    assert wheel.scan(str(tmp_path), "shop") == {b"\x00\xff": b"\x00\x01", b"a": b"1", b"c": b"3"}
    assert wheel.scan(str(tmp_path), "copy") == {b"a": b"1"}
    assert wheel.scan(str(tmp_path), "shop", checkpoint=checkpoint) == {b"a": b"1", b"c": b"3"}

    cli(shop, "restore", "--id", checkpoint, "--yes")
    assert wheel.scan(str(tmp_path), "shop") == {b"a": b"1", b"c": b"3"}


def test_commands_read_and_change_a_database_of_the_wheel(wheel: Wheel, tmp_path: Path) -> None:
    shutil.copytree(Path(databases()[0].store), tmp_path / "store")
    database = databases()[0]
    path = tmp_path / "store" / database.path
    rows = wheel.scan(str(tmp_path / "store"), database.path)

    assert cli_json(path, "scan", "--count")["entries"] == len(rows)
    cli(path, "put", "zzz", "ours")
    cli(path, "compact", "--full", "--patience", "0s")
    assert cli_json(path, "verify")["ok"] is True
    assert wheel.scan(str(tmp_path / "store"), database.path) == {**rows, b"zzz": b"ours"}


def test_seq_to_ts_and_ts_to_seq_return_what_the_wheel_returns(wheel: Wheel, tmp_path: Path) -> None:
    database = next(found for found in databases() if found.name == "compaction")
    shutil.copytree(database.store, tmp_path / "store")
    path = tmp_path / "store" / database.path
    last = cli_json(path, "read-manifest")["sequence_tracker"]["last"]
    for round_up in (False, True):
        rounding = "up" if round_up else "down"
        for seq in (last["seq"], last["seq"] - 1, last["seq"] + 1, 1):
            theirs = wheel.time_of(str(tmp_path / "store"), database.path, seq, up=round_up)
            done = CliRunner().invoke(
                app, ["-p", str(path), "seq-to-ts", str(seq), "--round", rounding, "--json"]
            )
            assert json.loads(done.stdout).get("ts_secs") == theirs
        for second in (last["time_secs"], last["time_secs"] - 1, last["time_secs"] + 1, 1):
            theirs = wheel.sequence_at(str(tmp_path / "store"), database.path, second, up=round_up)
            done = CliRunner().invoke(
                app, ["-p", str(path), "ts-to-seq", str(second), "--round", rounding, "--json"]
            )
            assert json.loads(done.stdout)["seq"] == theirs


@pytest.mark.slow
def test_a_worker_on_the_command_line_serves_the_coordinator_of_the_wheel(
    wheel: Wheel, tmp_path: Path
) -> None:
    wheel.hold(str(tmp_path), "db", coordinator={})
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from flagstone.cli.main import main; main()",
            "-p",
            str(tmp_path / "db"),
            "run-worker",
        ],
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            rows = {b"key%d" % number: b"value" for number in range(8)}
            for key, value in rows.items():
                wheel.held_apply("db", [("put", key, value), ("flush", "memtable")])
            deadline = time.monotonic() + 60
            while not cli_json(tmp_path / "db", "read-manifest")["compacted"]:
                assert time.monotonic() < deadline, cli(tmp_path / "db", "read-compactions")
                time.sleep(0.1)
            assert wheel.held_scan("db") == rows
        finally:
            worker.send_signal(signal.SIGTERM)
            _, errors = worker.communicate(timeout=30)
            wheel.release("db")
    assert worker.returncode == 0, errors
    assert wheel.scan(str(tmp_path), "db") == rows
