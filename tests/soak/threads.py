"""Threads that write, read, scan and flush one database, in either form of the kernels.

Run as a program it takes the seconds, so that a test can choose the form of the kernels by the environment. Each
writer owns its keys and counts up their values, so every answer can be judged: a value never goes back, belongs to the
key that was asked for, and a scan has every key that was there when it began.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.kernels import COMPILED
from flagstone.store.memory import MemoryStore
from flagstone.write.batch import WriteBatch

KEYS = 400
SETTINGS = Settings(
    flush_interval="5ms",  # type: ignore[arg-type]
    l0_sst_size_bytes=128 * 1024,
    l0_max_ssts=100_000,
    l0_max_ssts_per_key=100_000,
    garbage_collector_options=None,
)


class Stress:
    """The threads, what each key had at least, and what went wrong."""

    def __init__(self, db: Db, seconds: float) -> None:
        self.db = db
        self.until = time.monotonic() + seconds
        self.floor: dict[bytes, int] = {}
        self.problems: list[str] = []
        self.operations = 0

    def run(self) -> None:
        jobs = [lambda lane=lane: self.write(lane) for lane in range(2)]
        jobs += [self.get, self.get, self.scan, self.scan_backwards, self.flush]
        threads = [threading.Thread(target=self.guard, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def guard(self, job: Any) -> None:
        try:
            while time.monotonic() < self.until and not self.problems:
                job()
                self.operations += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is a finding
            self.problems.append(f"{type(error).__name__}: {error}")

    def write(self, lane: int) -> None:
        keys = [b"%d/%05d" % (lane, random.randrange(KEYS)) for _ in range(random.choice((1, 1, 8)))]
        batch = WriteBatch()
        values = {key: self.floor.get(key, 0) + 1 for key in keys}
        for key, value in values.items():
            batch.put(key, b"%s=%d" % (key, value))
        self.db.write(batch)
        self.floor.update(values)
        for key, value in values.items():
            if self.db.get(key) != b"%s=%d" % (key, value):
                self.problems.append(f"{key!r} was written as {value} and is {self.db.get(key)!r}")

    def get(self) -> None:
        key = b"%d/%05d" % (random.randrange(2), random.randrange(KEYS))
        floor = self.floor.get(key)
        self.judge(key, self.db.get(key), floor)

    def scan(self, *, reverse: bool = False) -> None:
        floors = dict(self.floor.copy())
        found = dict(self.db.scan(reverse=reverse))
        if list(found) != sorted(found, reverse=reverse):
            self.problems.append("a scan is out of order")
        for key, floor in floors.items():
            self.judge(key, found.get(key), floor)

    def scan_backwards(self) -> None:
        self.scan(reverse=True)

    def flush(self) -> None:
        time.sleep(0.02)
        self.db.flush(random.choice(("wal", "memtable")))

    def judge(self, key: bytes, value: bytes | None, floor: int | None) -> None:
        if floor is None:
            return
        owner, _, number = (value or b"").partition(b"=")
        if owner != key or int(number) < floor:
            self.problems.append(f"{key!r} had at least {floor}, and is {value!r}")


def main(seconds: float) -> None:
    sys.setswitchinterval(1e-5)  # so that threads switch between any two steps
    store = MemoryStore()
    db = open_database("db", store=store, settings=SETTINGS)
    stress = Stress(db, seconds)
    stress.run()
    assert not stress.problems, stress.problems[:5]
    db.close()
    with open_database("db", store=store, settings=SETTINGS) as db:
        found = dict(db.scan())
    assert found == {key: b"%s=%d" % (key, value) for key, value in stress.floor.items()}
    form = "compiled" if COMPILED else "interpreted"
    print(f"{form}: {seconds:.0f} s, {stress.operations} operations, {len(found)} keys: no problem")


if __name__ == "__main__":
    main(float(sys.argv[1]))
