"""Damaged objects of real databases, read through the public API: an error that names itself, or the same rows.

`DAMAGE_CASES` says how many cases there are; a few by default, 20,000 with `make damage`. `DAMAGE_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import resource

import pytest

from damage.damage_rig import (
    CODECS,
    GOLDEN_NAMES,
    KINDS,
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
_MOST_GROWTH_KB = 1024 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_or_harmless(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(f"{SEED} {kind}")
    tally = Tally()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(CASES // len(KINDS)):
        if chance.random() < 0.7:
            database = our_database(chance.choice(CODECS))
        else:
            database = golden_database(chance.choice(GOLDEN_NAMES))
        judge(tally, database, kind, chance)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    with capsys.disabled():
        if CASES > 300:
            print(f"\n{kind}: {dict(sorted(tally.outcomes.items()))}, memory grew by {grown_kb // 1024} MiB")
    assert tally.failures == []
    assert grown_kb < _MOST_GROWTH_KB


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_sound_databases_are_read_as_they_are(codec: str) -> None:
    database = our_database(codec)
    rows, found = truth(database, read_rows)
    assert len(rows) > 300
    assert found == [value for _, value in rows[::17]]
    verify(database.store())


def test_the_damage_is_damage() -> None:
    chance = random.Random(3)
    data = bytes(range(256))
    assert sum(damage(data, chance) != data for _ in range(500)) > 450
