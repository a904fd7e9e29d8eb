"""Every store call of compaction fails in every way; the rows stay the same and the compaction completes.

The first run counts the calls. Then each of them in turn fails before its effect, fails after it, or ends the process
before or after it. The surviving or restarted processes continue until nothing is left to compact.
"""

from __future__ import annotations

import pytest

from flagstone.metadata.compactions import Job, JobStatus, TieredSpec, add_job
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from flagstone.types import RunId
from flagstone.verification.verifier import Verifier
from kit.compactors import PATHS, CompactionWorld
from kit.faults import struck_calls

EFFECTS: list[Effect] = ["error", "lost_reply", "crash", "crash_after"]
FLUSHES = 4


def run_with(faults: list[Fault], *, together: bool) -> tuple[int, bool]:
    """One case; returns the calls made and whether the process ended."""
    clock, inner = VirtualClock(), MemoryStore()
    healthy = CompactionWorld(inner, clock=clock).create()
    faulty = FaultyStore(inner, faults, clock=clock)
    subject = CompactionWorld(faulty, clock=clock, seed=8)
    ended = False
    try:
        services = subject.pair() if together else (subject.coordinator(), subject.worker())
        for start in range(0, (2 if together else 1) * FLUSHES, FLUSHES):
            healthy.flush_many(FLUSHES, start=start)
            before = healthy.contents()
            healthy.settle(*services)
            assert healthy.contents() == before
    except Crashed:
        ended = True
    calls = len(faulty.calls)
    faulty.faults.clear()
    before = healthy.contents()
    clock.advance(60_000)  # longer than a silent worker is believed to live
    if ended:
        services = healthy.pair() if together else (healthy.coordinator(), healthy.worker())
    healthy.settle(*services)

    assert healthy.contents() == before
    assert len(healthy.manifest.tree.l0) < FLUSHES, healthy.jobs()
    assert all(job.status is JobStatus.COMPLETED for job in healthy.jobs())
    assert Verifier(inner, PATHS, clock=clock).verify().ok
    # One checkpoint for each commit, for any number of attempts.
    assert len({entry.id for entry in healthy.manifest.checkpoints}) == len(healthy.manifest.checkpoints)
    return calls, ended


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["one process", "two processes"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_at_any_store_call_of_a_compaction_loses_no_row_and_leaves_no_stuck_job(
    effect: Effect, together: bool
) -> None:
    calls, ended = run_with([], together=together)
    assert not ended
    for nth in struck_calls(calls):
        _, ended = run_with([Fault(effect, nth=nth)], together=together)
        assert ended == effect.startswith("crash"), nth
    print(f"{calls} calls, struck by {effect}")


def rewrite_with(faults: list[Fault]) -> tuple[int, bool]:
    """As `run_with`, for a job that rewrites a single run: its result has the id of its source."""
    clock, inner = VirtualClock(), MemoryStore()
    healthy = CompactionWorld(inner, clock=clock).create()
    healthy.flush_many(FLUSHES)
    healthy.settle(*healthy.pair())
    (run,) = healthy.manifest.tree.runs
    before, views = healthy.contents(), run.views
    spec = TieredSpec((), (run.id,), run.id)
    clock.advance(1)
    job_id = healthy.ids.ulid(clock.now_ms())
    healthy.compactions.update(lambda now: add_job(now.value, Job(job_id, spec)))
    faulty = FaultyStore(inner, faults, clock=clock)
    subject = CompactionWorld(faulty, clock=clock, seed=8)
    ended = False
    try:
        services = subject.pair()
        healthy.settle(*services)
    except Crashed:
        ended = True
    calls = len(faulty.calls)
    faulty.faults.clear()
    clock.advance(60_000)
    healthy.settle(*(healthy.pair() if ended else services))

    (rewritten,) = healthy.manifest.tree.runs
    assert rewritten.id == RunId(run.id)
    assert not set(rewritten.views) & set(views)
    assert healthy.contents() == before
    assert healthy.jobs()[-1].id == job_id
    assert healthy.jobs()[-1].status is JobStatus.COMPLETED
    assert Verifier(inner, PATHS, clock=clock).verify().ok
    return calls, ended


@pytest.mark.slow
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_at_any_store_call_of_a_rewrite_of_one_run_loses_no_row(effect: Effect) -> None:
    calls, ended = rewrite_with([])
    assert not ended
    for nth in struck_calls(calls):
        _, ended = rewrite_with([Fault(effect, nth=nth)])
        assert ended == effect.startswith("crash"), nth
    print(f"{calls} calls, struck by {effect}")
