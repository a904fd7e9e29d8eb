"""How much memory a process with a memory budget has, as the system counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="the size of a process is read from /proc"
    ),
]

MEASURED = """
import os, threading
import flagstone, flagstone.db.open
from flagstone import Settings
from flagstone.store.local import LocalStore

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = most = resident()
store = LocalStore({folder!r}, fsync=False)
value = os.urandom(100)

def note():
    global most
    most = max(most, resident())

{work}
note()
print(most - before)
"""

MANY = """
settings = Settings(memory_budget=256 << 20)
databases = [flagstone.open(f"db{number}", store=store, settings=settings) for number in range(200)]
for number in range(1_200):
    for db in databases:
        db.put(b"%016d" % (number * 7919 % 1201), value)
    if number % 10 == 0:
        note()
for db in databases:
    db.flush()
    note()
for db in databases:
    assert sum(1 for _ in db.scan()) == 1_200
note()
for db in databases:
    db.close()
"""

LOAD = """
with flagstone.open("db", store=store, settings=Settings(memory_budget=64 << 20)) as db:
    for number in range(600_000):
        db.put(b"%016d" % (number * 7919 % 600_011), value)
        if number % 1_000 == 0:
            note()
    db.flush()
    note()
    for _ in db.scan(limit=400_000):
        pass
    for number in range(0, 600_000, 300):
        db.get(b"%016d" % number)
"""


def most_memory(tmp_path: Path, work: str) -> int:
    """The most memory of a process while it does `work`, without what it had before."""
    code = MEASURED.format(folder=str(tmp_path), work=work)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=110, capture_output=True, text=True
    )
    return int(done.stdout)


def test_200_small_databases_stay_below_their_budget(tmp_path: Path) -> None:
    assert most_memory(tmp_path, MANY) < 256 << 20


def test_a_process_that_loads_rows_and_reads_them_stays_below_its_budget(tmp_path: Path) -> None:
    assert most_memory(tmp_path, LOAD) < 64 << 20
