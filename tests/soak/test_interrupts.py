"""Ctrl-C, again and again, in the middle of writes, flushes and checkpoints."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from soak.interrupts import Tally, run_round

ROUNDS = int(os.environ.get("INTERRUPT_ROUNDS", "2"))
SIGNALS = 100


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * ROUNDS)
def test_a_writer_interrupted_thousands_of_times_tears_no_batch_loses_no_row_and_never_hangs(
    tmp_path: Path,
) -> None:
    tally, chance = Tally(), random.Random()
    for number in range(ROUNDS):
        run_round(tmp_path / str(number), tally, signals=SIGNALS, chance=chance)
    print(tally)
    assert tally.interrupted > ROUNDS * SIGNALS // 4
