"""The base store or the commit log of a two-phase store fails in the middle of a write."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagstone.errors import Unavailable
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.port import ObjectChanged, ObjectExists
from flagstone.store.retrying import RetryingStore, RetryPolicy
from kit.two_phase import FailAt, TwoPhaseWorld

POLICY = RetryPolicy(deadline_s=5, initial_backoff_s=0, max_backoff_s=0)
STEPS = 12


def outage_at(call: int, moment: str) -> FailAt:
    """The n-th call fails once: before it was applied, or after it, when only the answer is lost."""
    return FailAt(call, moment, Unavailable)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_create_with_retries_succeeds_through_any_single_outage(tmp_path: Path, moment: str) -> None:
    happened = 0
    for call in range(STEPS):
        world = TwoPhaseWorld(SqliteCommitLog(tmp_path / f"{call}.db", synchronous="OFF"))
        for write in ("create", "update"):
            outage = outage_at(call, moment)
            store = RetryingStore(world.process(outage), policy=POLICY)
            if write == "create":
                version = store.put_if_absent("a", b"create")
            else:
                version = store.put_if_match("a", b"update", version)
            happened += outage.happened
            assert world.process().get("a").data == write.encode()
            assert world.process().head("a").version == version
        world.process().recover()
        world.process().collect_garbage(min_age_ms=0)
        world.check_settled()
        world.log.close()
    assert happened >= 10


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_refused_create_with_retries_is_refused_through_any_single_outage(
    tmp_path: Path, moment: str
) -> None:
    for call in range(STEPS):
        world = TwoPhaseWorld(SqliteCommitLog(tmp_path / f"{call}.db", synchronous="OFF"))
        stale = world.process().put_if_absent("a", b"winner", token="first")
        world.process().put_if_match("a", b"winner", stale, token="second")
        with pytest.raises(ObjectExists):
            RetryingStore(world.process(outage_at(call, moment)), policy=POLICY).put_if_absent("a", b"winner")
        # After an outage in the middle the client cannot know whether the update was applied and then replaced.
        with pytest.raises((ObjectChanged, Unavailable)):
            RetryingStore(world.process(outage_at(call, moment)), policy=POLICY).put_if_match(
                "a", b"x", stale
            )
        assert world.process().get("a").data == b"winner"
        world.log.close()
