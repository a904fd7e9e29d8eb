"""User-defined compaction filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flagstone.errors import InvalidRequest
from flagstone.lsm.compaction_filter import CompactionJob, Decision, Outcome, Replace
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, Row
from kit.executor import JOB, ExecutorRig


def row(key: bytes, seq: int, value: bytes = b"v", kind: int = VALUE) -> EntryTuple:
    return (key, seq, kind, value, None, None)


class ByValue:
    """Chooses the decision by the value, and records the rows it got."""

    def __init__(self, outcomes: dict[bytes, Any]) -> None:
        self.outcomes = outcomes
        self.asked: list[Row] = []

    def filter(self, row: Row) -> Outcome:
        self.asked.append(row)
        outcome: Outcome = self.outcomes.get(row.value, Decision.KEEP)
        return outcome


class WithOperands(ByValue):
    def filter_operand(self, row: Row) -> Outcome:
        return self.filter(row)


def compacted(
    filtering: ByValue, *sources: list[EntryTuple], min_seq: int = 100, last: bool = True
) -> list[EntryTuple]:
    rig = ExecutorRig(compaction_filter=lambda _: filtering)
    rig.set_sources(sources, min_seq=min_seq, clock_ms=0)
    return rig.rows(rig.run(rig.spec(0 if last else 9)))


def test_a_filter_keeps_drops_replaces_and_deletes_rows() -> None:
    filtering = ByValue(
        {b"drop": Decision.DROP, b"tomb": Decision.TOMBSTONE, b"old": Replace(b"new"), b"keep": Decision.KEEP}
    )
    rows = [row(b"a", 4, b"drop"), row(b"b", 3, b"keep"), row(b"c", 2, b"old"), row(b"d", 1, b"tomb")]
    kept = [row(b"b", 3, b"keep"), row(b"c", 2, b"new")]
    assert compacted(filtering, rows) == kept
    assert compacted(filtering, rows, last=False) == [*kept, row(b"d", 1, b"", TOMBSTONE)]


def test_a_filter_sees_only_rows_that_retention_keeps_and_no_snapshot_needs() -> None:
    filtering = ByValue({})
    rows = [row(b"k", seq, b"%d" % seq) for seq in (9, 8, 5, 4)]
    assert [kept[1] for kept in compacted(filtering, rows, min_seq=5)] == [9, 8, 5]
    assert [asked.value for asked in filtering.asked] == [b"5"]


def test_the_last_sorted_run_gets_no_tombstone_over_a_row_that_the_filter_dropped() -> None:
    filtering = ByValue({b"drop": Decision.DROP})
    rows = [row(b"k", 9, b"", TOMBSTONE), row(b"k", 5, b"drop")]
    assert compacted(filtering, rows, min_seq=5) == []
    assert compacted(filtering, rows, min_seq=5, last=False) == rows[:1]


def test_operands_are_kept_unless_the_filter_asks_for_them() -> None:
    rows = [row(b"k", 3, b"op", MERGE)]
    assert compacted(ByValue({b"op": Decision.DROP}), rows) == rows
    assert compacted(WithOperands({b"op": Decision.DROP}), rows) == []
    replaced = compacted(WithOperands({b"op": Replace(b"other")}), rows)
    assert replaced == [row(b"k", 3, b"other", MERGE)]


def test_a_filter_factory_gets_the_job_and_may_return_no_filter() -> None:
    jobs: list[CompactionJob] = []

    def factory(job: CompactionJob) -> None:
        jobs.append(job)

    rig = ExecutorRig(compaction_filter=factory)
    rig.set_sources([[row(b"a", 2)], [row(b"a", 1)]], min_seq=7, clock_ms=33)
    assert rig.rows(rig.run()) == [row(b"a", 2)]
    assert rig.rows(rig.run(rig.spec(9))) == [row(b"a", 2)]
    assert [(job.job_id, job.is_last_run, job.min_seq, job.clock_ms) for job in jobs] == [
        (JOB, True, 7, 33),
        (JOB, False, 7, 33),
    ]
    assert [job.destination for job in jobs] == [0, 9]


@pytest.mark.parametrize("answer", [None, True, b"bytes", Replace("text")])  # type: ignore[arg-type]
def test_a_filter_that_returns_no_decision_fails_the_job(answer: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"Decision\.KEEP"):
        compacted(ByValue({b"v": answer}), [row(b"a", 1)])


def test_an_error_of_a_filter_names_the_key() -> None:
    class Broken:
        def filter(self, row: Row) -> Outcome:
            raise RuntimeError("no")

    rig = ExecutorRig(compaction_filter=_always(Broken()))
    rig.set_sources([[row(b"the-key", 1)]], min_seq=7, clock_ms=0)
    with pytest.raises(RuntimeError) as raised:
        rig.run()
    assert any("the-key" in note for note in raised.value.__notes__)


def test_a_filter_gets_many_rows_in_key_order() -> None:
    rows = [row(b"%06d" % number, number + 1, b"x" * 50) for number in range(3000)]
    filtering = ByValue({})
    assert compacted(filtering, rows, min_seq=10_000) == rows
    assert [asked.key for asked in filtering.asked] == [entry[0] for entry in rows]


def _always(filtering: Any) -> Callable[[CompactionJob], Any]:
    return lambda _: filtering
