"""A killed writer loses no row that was acknowledged as durable. `make crash` runs many rounds, a test run a few."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servers.s3 import S3Server
from soak.kill9 import Tally, run_rounds

pytestmark = pytest.mark.slow

LOCAL_ROUNDS = int(os.environ.get("KILL9_ROUNDS", "5"))
REMOTE_ROUNDS = int(os.environ.get("KILL9_REMOTE_ROUNDS", "0"))
ROUNDS_PER_DATABASE = 25
SEED = int(os.environ.get("KILL9_SEED", "1"))


@pytest.mark.timeout(900)
def test_no_acknowledged_row_is_lost_when_the_writer_is_killed_on_local_files(tmp_path: Path) -> None:
    tally = Tally()
    for first in range(0, LOCAL_ROUNDS, ROUNDS_PER_DATABASE):
        rounds = min(ROUNDS_PER_DATABASE, LOCAL_ROUNDS - first)
        run_rounds({"path": str(tmp_path / f"db-{first}")}, rounds, seed=SEED + first, tally=tally)
    print(tally)
    assert tally.rounds == LOCAL_ROUNDS


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not REMOTE_ROUNDS, reason="many seconds per round: set KILL9_REMOTE_ROUNDS, or `make crash`"
)
def test_no_acknowledged_row_is_lost_when_the_writer_is_killed_on_an_object_store(
    seaweedfs: S3Server,
) -> None:
    place = {"path": "kill9", "store": seaweedfs.url, "store_options": seaweedfs.options()}
    tally = run_rounds(place, REMOTE_ROUNDS, seed=SEED)
    print(tally)
    assert tally.rounds == REMOTE_ROUNDS
