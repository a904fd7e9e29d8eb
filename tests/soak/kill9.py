"""A writer is killed at random moments, again and again; each time its rows are checked.

The child writes in several threads: single durable rows, asynchronous ones, batches. It writes to its standard
output, row by row, what was acknowledged as durable. The parent kills it with SIGKILL, opens the database itself
and checks, per thread of the child: every acknowledged row is there, rows are there without gaps and with the
right values, nothing else is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from flagstone.config import CompactionWorkerOptions, CompactorOptions, Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.write.batch import WriteBatch

LANES = ("durable", "asynchronous", "batches")
READY = "ready"
LONGEST_LIFE_S = 0.25
SETTINGS = Settings(
    flush_interval="2ms",  # type: ignore[arg-type]
    l0_sst_size_bytes=32 * 1024,
    l0_max_ssts=100_000,
    l0_max_ssts_per_key=100_000,
    # So quick that kills fall into compactions, and that the next process continues the jobs of a dead one.
    compactor_options=CompactorOptions(
        poll_interval="10ms",  # type: ignore[arg-type]
        worker_heartbeat_timeout="300ms",  # type: ignore[arg-type]
        worker=CompactionWorkerOptions(heartbeat_interval="20ms", max_sst_size=32 * 1024),  # type: ignore[arg-type]
    ),
    garbage_collector_options=None,
)


@dataclass
class Tally:
    """What happened over all rounds."""

    rounds: int = 0
    killed_before_open: int = 0
    acknowledged: int = 0
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))


def key_of(lane: str, number: int) -> bytes:
    return f"{lane}/{number:012d}".encode()


def value_of(key: bytes) -> bytes:
    return blake2b(key).digest()


# -- the child --------------------------------------------------------------------------------------------


def write_for_ever(place: dict[str, Any], start: dict[str, int]) -> None:
    db = open_database(**place, settings=SETTINGS)
    print_line(READY)
    lanes = {"durable": write_durably, "asynchronous": write_asynchronously, "batches": write_batches}
    for lane, write in lanes.items():
        threading.Thread(target=write, args=(db, start[lane]), daemon=True).start()
    while True:
        time.sleep(0.03)
        db.flush("memtable")


def write_durably(db: Db, number: int) -> None:
    while True:
        number += 1
        key = key_of("durable", number)
        db.put(key, value_of(key), await_durable=True)
        print_line(f"durable {number}")


def write_asynchronously(db: Db, number: int) -> None:
    while True:
        for _ in range(20):
            number += 1
            key = key_of("asynchronous", number)
            handle = db.put(key, value_of(key))
        handle.wait()
        print_line(f"asynchronous {number}")


def write_batches(db: Db, number: int) -> None:
    while True:
        batch = WriteBatch()
        for _ in range(7):
            number += 1
            key = key_of("batches", number)
            batch.put(key, value_of(key))
        db.write(batch, await_durable=True)
        print_line(f"batches {number}")


def print_line(line: str) -> None:
    # One call, past all buffers: the line survives the end of the process.
    os.write(1, f"{line}\n".encode())


# -- the parent -------------------------------------------------------------------------------------------


def run_rounds(place: dict[str, Any], rounds: int, *, seed: int, tally: Tally | None = None) -> Tally:
    """Kill a writer `rounds` times and check after each; raises AssertionError with the round and the seed."""
    tally = tally or Tally()
    chance = random.Random(seed)
    start = dict.fromkeys(LANES, 0)
    for number in range(rounds):
        lines = run_child(place, start, chance, tally)
        acknowledged = {lane: lines.get(lane, start[lane]) for lane in LANES}
        where = f"round {number}, seed {seed}"
        tally.acknowledged += sum(acknowledged[lane] - start[lane] for lane in LANES)
        tally.rounds += 1
        start = check_rows(place, acknowledged, where)
    report = Admin(place["path"], **{name: place[name] for name in place if name != "path"}).verify()
    assert report.ok, report
    for lane in LANES:
        tally.kept[lane] += start[lane]
    return tally


def run_child(
    place: dict[str, Any], start: dict[str, int], chance: random.Random, tally: Tally
) -> dict[str, int]:
    """One life of the writer. Returns the last row of each lane that it acknowledged."""
    child = subprocess.Popen(
        [sys.executable, __file__, json.dumps({**place, "path": str(place["path"])}), json.dumps(start)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    lines: list[str] = []
    ready = threading.Event()
    reader = threading.Thread(target=collect, args=(child.stdout, lines, ready))
    reader.start()
    if chance.random() < 0.2:
        time.sleep(chance.uniform(0.2, 0.7))  # perhaps while it opens
    else:
        assert ready.wait(60), "the writer did not open the database"
        time.sleep(chance.uniform(0, LONGEST_LIFE_S))
    alive = child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    reader.join()
    assert alive, f"the writer ended by itself with {child.returncode}"
    tally.killed_before_open += READY not in lines
    lines: dict[str, int] = {}
    for line in lines:
        lane, _, number = line.partition(" ")
        if number:
            lines[lane] = int(number)
    return lines


def collect(stream: IO[str], lines: list[str], ready: threading.Event) -> None:
    with stream:
        for line in stream:
            if line.endswith("\n"):
                lines.append(line.strip())
            if line.strip() == READY:
                ready.set()


def check_rows(place: dict[str, Any], acknowledged: dict[str, int], where: str) -> dict[str, int]:
    """Open what was left, compare, and return the last row of each lane."""
    with open_database(**place, settings=SETTINGS) as db:
        found = list(db.scan())
    numbers: dict[str, list[int]] = {lane: [] for lane in LANES}
    for key, value in found:
        lane, _, number = key.decode().partition("/")
        assert value == value_of(key), f"{where}: a row that was never written at {key!r}"
        numbers[lane].append(int(number))
    for lane, present in numbers.items():
        assert present == list(range(1, len(present) + 1)), f"{where}: a gap in {lane}"
        assert len(present) >= acknowledged[lane], (
            f"{where}: {acknowledged[lane]} rows of {lane} were acknowledged, {len(present)} are there"
        )
    assert len(numbers["batches"]) % 7 == 0, f"{where}: half a batch"
    return {lane: len(present) for lane, present in numbers.items()}


if __name__ == "__main__":
    write_for_ever(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
