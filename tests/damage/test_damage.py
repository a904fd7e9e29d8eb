"""Damaged objects of real databases, read through the public API: a `CorruptData` error, or the same rows.

`DAMAGE_CASES` is the number of cases; a few by default, 20,000 with `make damage`. `DAMAGE_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from damage.damage_rig import (
    CODECS,
    GOLDEN_NAMES,
    KINDS,
    CachedReader,
    Tally,
    damage,
    golden_database,
    judge,
    our_database,
    read_rows,
    truth,
    verify,
)

CASES = int(os.environ.get("DAMAGE_CASES", "300"))
SEED = int(os.environ.get("DAMAGE_SEED", "1"))
CASES_PER_KIND = CASES // (len(KINDS) + 1)
_MOST_GROWTH_KB = 1024 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_raises_corrupt_data_or_changes_no_result(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(f"{SEED} {kind}")
    tally = Tally()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while tally.outcomes.total() < CASES_PER_KIND:
        if chance.random() < 0.7:
            database = our_database(chance.choice(CODECS))
        else:
            database = golden_database(chance.choice(GOLDEN_NAMES))
        judge(tally, database, kind, chance)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    _report(capsys, kind, tally, f", memory grew by {grown_kb // 1024} MiB")
    assert tally.failures == []
    assert grown_kb < _MOST_GROWTH_KB


@pytest.mark.slow
def test_a_damaged_part_of_the_disk_cache_changes_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(f"{SEED} cache")
    readers = [CachedReader(our_database(codec), tmp_path / (codec or "plain")) for codec in CODECS]
    tally = Tally()
    while tally.outcomes.total() < CASES_PER_KIND:
        chance.choice(readers).judge(tally, chance)
    _report(capsys, "cache parts", tally)
    assert tally.failures == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_undamaged_databases_are_read_completely(codec: str) -> None:
    database = our_database(codec)
    rows, found = truth(database, read_rows)
    assert len(rows) > 300
    assert found == [value for _, value in rows[::17]]
    verify(database.store())


def _report(capsys: pytest.CaptureFixture[str], kind: str, tally: Tally, more: str = "") -> None:
    if CASES > 300:
        with capsys.disabled():
            print(f"\n{kind}: {tally.outcomes.total()} cases, {dict(sorted(tally.outcomes.items()))}{more}")


def test_damage_changes_the_bytes_almost_always() -> None:
    chance = random.Random(3)
    data = bytes(range(256))
    assert sum(damage(data, chance) != data for _ in range(500)) > 450
