"""The conflict tracker against a model that keeps and compares all writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import TransactionConflict
from flagstone.types import KeyRange
from flagstone.write.conflicts import ConflictTracker, Isolation, TransactionState

keys = st.sampled_from([b"\0", b"0", b"A", b"A\0", b"A\\", b"b", b"b\xff", b"\xff"])
edges = st.one_of(st.none(), keys)
slots = st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("begin"), slots, st.sampled_from(["snapshot", "serializable"])),
    st.tuples(st.just("read"), slots, keys),
    st.tuples(st.just("scan"), slots, st.builds(KeyRange, edges, edges)),
    st.tuples(st.just("mark_read"), slots, keys),
    st.tuples(st.just("write"), slots, keys),
    st.tuples(st.just("unmark_write"), slots, keys),
    st.tuples(st.just("commit"), slots, st.booleans()),
    st.tuples(st.just("rollback"), slots, st.none()),
    st.tuples(st.just("plain"), st.booleans(), st.sets(keys, min_size=1, max_size=3)),
    st.tuples(st.just("durable"), st.none(), st.none()),
)


@dataclass
class Naive:
    """Everything a transaction did, and every commit there ever was."""

    start: int
    isolation: Isolation
    reads: set[bytes] = field(default_factory=set)
    marked: set[bytes] = field(default_factory=set)
    ranges: list[KeyRange] = field(default_factory=list)
    writes: set[bytes] = field(default_factory=set)
    unmarked: set[bytes] = field(default_factory=set)

    @property
    def effective(self) -> set[bytes]:
        return self.writes - self.unmarked

    def conflicts(self, commits: list[tuple[int, set[bytes]]]) -> set[bytes]:
        since = {key for seq, written in commits if seq > self.start for key in written}
        depends = self.effective | self.marked
        if self.isolation == "serializable":
            depends |= self.reads | {key for key in since for span in self.ranges if key in span}
        return since & depends


@given(st.lists(steps, max_size=60))
def test_every_conflict_decision_equals_that_of_a_model_that_keeps_all_writes(history: list[Any]) -> None:
    tracker = ConflictTracker()
    running: dict[int, tuple[TransactionState, Naive]] = {}
    commits: list[tuple[int, set[bytes]]] = []
    last = committed = 0
    pending: list[int] = []

    def record(written: set[bytes], *, synchronous: bool) -> None:
        nonlocal last, committed
        last += 1
        if synchronous:
            pending.append(last)
        elif not pending:
            committed = last
        commits.append((last, set(written)))
        # As in the committer: a write is recorded only if a transaction could conflict with it.
        if tracker.running or committed != last:
            tracker.record_commit(last, set(written), committed_seq=committed)

    for action, where, what in history:
        if action == "plain":
            record(what, synchronous=where)
        elif action == "durable":
            pending.clear()
            committed = last
        elif action == "begin":
            if where not in running:
                running[where] = (tracker.begin(committed, what), Naive(committed, what))
        elif where in running:
            state, naive = running[where]
            if action == "read":
                state.track_read(what)
                naive.reads.add(what)
            elif action == "scan":
                state.track_range(what)
                naive.ranges.append(what)
            elif action == "mark_read":
                state.mark_read([what])
                naive.marked.add(what)
            elif action == "write":
                state.track_write(what)
                naive.writes.add(what)
            elif action == "unmark_write":
                state.unmark_write([what])
                naive.unmarked.add(what)
            else:
                del running[where]
                if action == "commit":
                    expected = naive.conflicts(commits)
                    try:
                        tracker.check(state)
                    except TransactionConflict as conflict:
                        assert any(repr(key) in str(conflict) for key in expected)
                    else:
                        assert not expected
                        record(naive.effective, synchronous=what)
                tracker.end(state)
        starts = [naive.start for _, naive in running.values()]
        assert tracker.min_active_seq() == min(starts, default=None)
        assert len(tracker.running) == len(running)
    for state, _ in running.values():
        tracker.end(state)
    tracker.record_commit(last + 1, (), committed_seq=last + 1)
    assert tracker.tracked_keys == 0
