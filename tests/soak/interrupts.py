"""A writer that gets Ctrl-C thousands of times, continues each time, and is killed in the end.

The child writes batches in its main thread, where the interpreter raises `KeyboardInterrupt`, while another thread
writes beside it. It writes down which batches returned, and which of them durably. A batch is torn if some of its rows
are there and others not. The parent interrupts it at random moments, kills it, opens the database and compares.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.write.batch import WriteBatch

ROWS = 5
SETTINGS = Settings(
    flush_interval="2ms",  # type: ignore[arg-type]
    l0_sst_size_bytes=16 * 1024,
    l0_max_ssts=100_000,
    l0_max_ssts_per_key=100_000,
    compactor_options=None,
    garbage_collector_options=None,
)


@dataclass
class Tally:
    """What happened over all rounds."""

    rounds: int = 0
    signals: int = 0
    interrupted: int = 0
    batches: int = 0
    durable: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.signals} signals, {self.interrupted} interrupted calls, "
            f"{self.batches} batches, {self.durable} of them durable: none torn, none lost"
        )


def key_of(lane: str, number: int, row: int) -> bytes:
    return f"{lane}/{number:08d}/{row}".encode()


def write(db: Db, lane: str, number: int, *, durable: bool) -> None:
    batch = WriteBatch()
    for row in range(ROWS):
        batch.put(key_of(lane, number, row), b"%d" % number)
    db.write(batch, await_durable=durable)


def child(path: str) -> None:
    """Write until killed; every line of the output is a fact."""
    armed = False
    interrupted = 0

    def interrupt(*_: object) -> None:
        # As the interpreter does it; but one interrupt at a time, so that none strikes where this program handles one.
        nonlocal armed, interrupted
        if armed:
            armed = False
            interrupted += 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    db = open_database(path, settings=SETTINGS)

    def beside() -> None:
        for number in range(10**9):
            write(db, "beside", number, durable=number % 50 == 0)
            time.sleep(0.0005)

    threading.Thread(target=beside, daemon=True).start()
    print("ready", flush=True)
    number = 0
    returned: list[int] = []
    while True:
        try:
            armed = True
            while True:
                number += 1
                durable = number % 7 == 0
                if number % 31 == 0:
                    db.flush()
                if number % 97 == 0:
                    db.checkpoint(scope="durable", name="soak")
                write(db, "main", number, durable=durable)
                returned.append(number)
                seen = {key for key, _ in db.scan(prefix=b"main/%08d/" % number)}
                if len(seen) != ROWS:
                    os.write(1, f"torn {number} {len(seen)}\n".encode())
                if durable:
                    # One write of the operating system: an interrupt cannot cut a fact in half.
                    os.write(1, (json.dumps([interrupted, *returned]) + "\n").encode())
                    returned = []
        except KeyboardInterrupt:
            pass


def run_round(path: Path, tally: Tally, *, signals: int, chance: random.Random) -> None:
    """One child from its start to its death, and the comparison."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(path)], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    facts: list[str] = []
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    reader = threading.Thread(target=lambda: facts.extend(process.stdout or ()))
    reader.start()
    try:
        for _ in range(signals):
            time.sleep(chance.uniform(0.0002, 0.006))
            process.send_signal(signal.SIGINT)
        # It must still be alive, and come to another durable batch.
        known, deadline = len(facts), time.monotonic() + 20
        while len(facts) <= known and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process.poll() is None, "an interrupt ended the writer"
        assert len(facts) > known, "after the interrupts no write became durable: the writer hangs"
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
    judge(path, facts, tally)
    tally.rounds += 1
    tally.signals += signals


def judge(path: Path, facts: list[str], tally: Tally) -> None:
    torn = [fact for fact in facts if fact.startswith("torn")]
    assert not torn, torn
    certain: set[int] = set()
    for fact in facts:
        if fact.endswith("\n"):
            interrupted, *returned = json.loads(fact)
            certain |= set(returned)
    tally.interrupted += interrupted
    tally.durable += len(certain)
    with open_database(path, settings=SETTINGS) as db:
        found: dict[tuple[str, int], int] = {}
        numbers: dict[int, set[Any]] = {}
        for row in db.scan().rows():
            lane, number, _ = row.key.decode().split("/")
            found[lane, int(number)] = found.get((lane, int(number)), 0) + 1
            numbers.setdefault(row.seq, set()).add((lane, int(number)))
    assert {batch: rows for batch, rows in found.items() if rows != ROWS} == {}, "torn"
    assert {number for number in certain if ("main", number) not in found} == set(), "lost"
    assert [batches for batches in numbers.values() if len(batches) > 1] == [], "two writes under one number"
    tally.batches += len(found)


if __name__ == "__main__":
    child(sys.argv[1])
