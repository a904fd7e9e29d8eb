"""Executors killed with SIGKILL in the middle of a load, a read, a compaction and a stream change no result.

The session runs in a process of its own (`kill_session.py`), with two executors that are processes. `SPARK_KILLS` is
the number of rounds, `SPARK_KILLS_SEED` decides which process is killed: `make spark-long`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections import Counter as Counts
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin
from flagstone.lsm.operators import Counter
from flagstone.metadata.manifest import SEQ_GAP
from kit.databases import QUIET
from kit.spark_loads import shown
from spark.kill_session import CHANGES, ROWS

ROUNDS = int(os.environ.get("SPARK_KILLS", "0"))
SEED = int(os.environ.get("SPARK_KILLS_SEED", "1"))
TIMEOUT_S = 420 + 180 * ROUNDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(
        not ROUNDS, reason="starts three Java processes: set SPARK_KILLS, or `make spark-long`"
    ),
]


def row(number: int, text: str) -> tuple[bytes, bytes]:
    return b"k%08d" % number, f"{text} {number}{'.' * 80}".encode()


LOADED = dict(row(number, "loaded") for number in range(ROWS))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = tmp_path_factory.mktemp("kills")
    script = Path(__file__).with_name("kill_session.py")
    log = base / "log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, str(script), str(base), str(ROUNDS), str(SEED)],
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
            check=False,
        )
    print(log.read_text()[-4000:])
    assert done.returncode == 0
    reports: list[dict[str, Any]] = json.loads((base / "report.json").read_text())
    assert len(reports) == ROUNDS
    return reports


def assert_no_orphans(folder: Path) -> None:
    """After garbage collection only the SSTs of the newest manifest are left, and the database is sound."""
    # Those of reads and of compactions, which expire later.
    for checkpoint in Admin(folder).checkpoints():
        Admin(folder).delete_checkpoint(checkpoint.id)
    # Garbage collection keeps an SST newer than all of L0: it may be about to be committed (ADR 0017).
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"after", b"here")
    Admin(folder).collect_garbage(min_age=timedelta())
    # Only finished objects: a process killed during a put leaves a temporary file, which the store does not list.
    held = {path.name for path in (folder / "compacted").glob("*.sst")}
    assert len(held) == len(Admin(folder).manifest().value.ssts), sorted(held)
    found = Admin(folder).verify()
    assert not found.findings, found.findings


def test_every_kind_of_job_lost_a_process_while_it_ran(rounds: list[dict[str, Any]]) -> None:
    struck: Counts[str] = Counts()
    for report in rounds:
        assert [kill["job"] for kill in report["kills"]] == ["load", "read", "compaction", "stream"]
        struck.update(kill["job"] for kill in report["kills"] if kill["tasks_lost"])
    # A short job may end before the process that is killed gets a task: that happens, but not always.
    assert all(struck[job] >= len(rounds) / 4 for job in ("load", "read", "compaction", "stream")), struck


def test_after_kills_a_load_and_a_read_show_every_row_once(rounds: list[dict[str, Any]]) -> None:
    checksum = sum(zlib.crc32(key + value) for key, value in LOADED.items())
    for report in rounds:
        assert report["answers"]["load"] == ROWS
        assert report["answers"]["read"] == {"rows": ROWS, "keys": ROWS, "checksum": checksum}


def test_after_kills_a_compaction_shows_the_newest_rows_and_leaves_no_orphan(
    rounds: list[dict[str, Any]],
) -> None:
    expected = dict(LOADED)
    for turn in range(2):
        expected |= dict(
            row(number, f"turn {turn}") for number in range(ROWS) if zlib.crc32(b"k%08d" % number) % 3 == turn
        )
    for report in rounds:
        folder = Path(report["folder"]) / "db"
        manifest = Admin(folder).manifest().value
        # One sequence number for each of three loads: no load was committed twice.
        assert manifest.last_l0_seq == 3 * SEQ_GAP
        assert report["answers"]["compaction"] == 1
        assert len(manifest.tree.runs) == 1
        assert shown(folder) == expected
        assert_no_orphans(folder)


def test_after_kills_a_stream_delivers_every_change_once_and_leaves_no_orphan(
    rounds: list[dict[str, Any]],
) -> None:
    for report in rounds:
        folder = Path(report["folder"]) / "target"
        assert report["answers"]["stream"] is None
        counts = {
            key: Counter.decode(value)
            for key, value in shown(folder, merge_operator=Counter()).items()
            if not key.startswith(b"\0")
        }
        assert counts == {b"c%06d" % number: 1 for number in range(CHANGES)}
        assert_no_orphans(folder)
