from __future__ import annotations

import pytest

from flagstone.errors import InternalError, TransactionConflict
from flagstone.types import KeyRange
from flagstone.write.conflicts import ConflictTracker, Isolation, TransactionExpired, TransactionState


class History:
    """Writes and transactions, each under the next number and visible at once."""

    def __init__(self, **options: int) -> None:
        self.tracker = ConflictTracker(**options)
        self.seq = 100

    def begin(self, isolation: Isolation = "snapshot", deadline_ms: int | None = None) -> TransactionState:
        return self.tracker.begin(self.seq, isolation, deadline_ms=deadline_ms)

    def write(self, *keys: bytes) -> None:
        self.seq += 1
        self.tracker.record_commit(self.seq, keys, committed_seq=self.seq)

    def commit(self, state: TransactionState, *keys: bytes) -> None:
        for key in keys:
            state.track_write(key)
        try:
            self.tracker.check(state)
            self.seq += 1
            self.tracker.record_commit(self.seq, state.write_keys, committed_seq=self.seq)
        finally:
            self.tracker.end(state)


@pytest.fixture
def history() -> History:
    return History()


def test_the_second_of_two_transactions_that_write_a_key_conflicts(history: History) -> None:
    first, second = history.begin(), history.begin()
    history.commit(first, b"k")

    with pytest.raises(TransactionConflict, match=r"b'k' .* 101\) after the transaction began at 100"):
        history.commit(second, b"k")


def test_a_transaction_conflicts_with_a_plain_write(history: History) -> None:
    state = history.begin()
    history.write(b"a", b"k")

    with pytest.raises(TransactionConflict, match="b'k'"):
        history.commit(state, b"k", b"z")


def test_writes_before_the_start_of_a_transaction_do_not_conflict(history: History) -> None:
    other = history.begin()
    history.write(b"k")
    state = history.begin()

    history.commit(state, b"k")
    with pytest.raises(TransactionConflict):
        history.commit(other, b"k")


def test_write_skew_passes_under_snapshot_isolation(history: History) -> None:
    first, second = history.begin(), history.begin()
    for state in (first, second):
        state.track_read(b"a")
        state.track_read(b"b")

    history.commit(first, b"a")
    history.commit(second, b"b")


def test_write_skew_fails_under_serializable_isolation(history: History) -> None:
    first, second = history.begin("serializable"), history.begin("serializable")
    for state in (first, second):
        state.track_read(b"a")
        state.track_read(b"b")

    history.commit(first, b"a")
    with pytest.raises(TransactionConflict, match="b'a'"):
        history.commit(second, b"b")


@pytest.mark.parametrize(
    ("keys", "written", "conflicts"),
    [
        (KeyRange(b"b", b"d"), b"c", True),
        (KeyRange(b"b", b"d"), b"b", True),
        (KeyRange(b"b", b"d"), b"d", False),
        (KeyRange(b"b", b"d"), b"a", False),
        (KeyRange(), b"z", True),
        (KeyRange(None, b"d"), b"a", True),
        (KeyRange(b"d", None), b"e", True),
        (KeyRange(b"d", b"b"), b"c", False),
    ],
)
def test_a_row_that_appears_in_a_scanned_range_conflicts(
    history: History, keys: KeyRange, written: bytes, conflicts: bool
) -> None:
    state = history.begin("serializable")
    state.track_range(keys)
    history.write(written)

    if conflicts:
        with pytest.raises(TransactionConflict):
            history.commit(state, b"elsewhere")
    else:
        history.commit(state, b"elsewhere")


def test_a_range_read_does_not_conflict_under_snapshot_isolation(history: History) -> None:
    state = history.begin()
    state.track_range(KeyRange())
    history.write(b"c")

    history.commit(state, b"elsewhere")


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_a_marked_read_conflicts_under_both_isolations(history: History, isolation: Isolation) -> None:
    state = history.begin(isolation)
    state.mark_read([b"k"])
    history.write(b"k")

    with pytest.raises(TransactionConflict):
        history.commit(state, b"elsewhere")


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_an_unmarked_write_conflicts_neither_with_earlier_nor_with_later_writes(
    history: History, isolation: Isolation
) -> None:
    mine, other = history.begin(isolation), history.begin(isolation)
    mine.track_write(b"k")
    mine.unmark_write([b"k"])
    mine.track_write(b"k")
    history.write(b"k")
    history.commit(mine)

    late = history.begin(isolation)
    again = history.begin(isolation)
    again.unmark_write([b"k"])
    history.commit(again, b"k")
    late.track_read(b"k")
    history.commit(late, b"k")
    with pytest.raises(TransactionConflict):
        history.commit(other, b"k")


def test_a_synchronous_write_conflicts_with_a_transaction_that_started_before_it_was_visible() -> None:
    # It is on its way to the store, so the transaction starts below it and does not see it.
    tracker = ConflictTracker()
    tracker.record_commit(11, [b"k"], committed_seq=10)
    state = tracker.begin(10, "snapshot")
    state.track_write(b"k")

    with pytest.raises(TransactionConflict):
        tracker.check(state)


def test_a_key_written_twice_still_conflicts_after_its_first_write_was_discarded(history: History) -> None:
    old = history.begin()
    history.write(b"k")
    young = history.begin()
    history.write(b"k")
    history.tracker.end(old)
    history.write(b"other")

    with pytest.raises(TransactionConflict, match="b'k'"):
        history.commit(young, b"k")


def test_a_transaction_with_more_keys_than_all_others_has_the_same_conflicts(history: History) -> None:
    old = history.begin()
    history.write(b"5")
    young = history.begin()
    many = [b"%d" % number for number in range(50)]

    history.commit(young, *many)
    with pytest.raises(TransactionConflict):
        history.commit(old, b"7", *many)


def test_a_range_conflicts_with_the_kept_writes_after_many_were_discarded(history: History) -> None:
    old = history.begin("serializable")
    for number in range(20):
        history.write(b"a%02d" % number)
    young = history.begin("serializable")
    young.track_range(KeyRange(b"b", b"c"))
    history.write(b"b")
    history.tracker.end(old)
    history.write(b"z")

    with pytest.raises(TransactionConflict, match="b'b'"):
        history.commit(young, b"x")


# -- memory -----------------------------------------------------------------------------------------------


def test_without_a_running_transaction_no_write_is_kept(history: History) -> None:
    history.write(b"a")
    assert history.tracker.tracked_keys == 0
    state = history.begin()
    history.write(b"a", b"b")
    assert history.tracker.tracked_keys == 2

    history.tracker.end(state)

    assert history.tracker.tracked_keys == 0
    assert history.tracker.running == {}


def test_writes_visible_to_every_running_transaction_are_discarded(history: History) -> None:
    old = history.begin()
    history.write(b"a")
    young = history.begin()
    young.track_range(KeyRange())
    history.write(b"b")
    history.tracker.end(old)
    history.write(b"c")

    assert history.tracker.tracked_keys == 2
    history.commit(young, b"a")


def test_a_synchronous_write_is_discarded_once_it_is_visible() -> None:
    tracker = ConflictTracker()
    tracker.record_commit(11, [b"k"], committed_seq=10)
    tracker.record_commit(12, [b"k"], committed_seq=12)

    assert tracker.tracked_keys == 0


def test_beyond_the_memory_limit_old_transactions_conflict_and_young_ones_commit() -> None:
    history = History(max_tracked_keys=3)
    old = history.begin()
    history.write(b"a")
    young = history.begin()
    for key in (b"b", b"c", b"d"):
        history.write(key)

    assert history.tracker.tracked_keys == 3
    with pytest.raises(TransactionExpired, match="more than 3 keys"):
        history.commit(old, b"x")
    history.commit(young, b"a")


def test_a_write_larger_than_the_memory_limit_is_accepted() -> None:
    history = History(max_tracked_keys=3)
    state = history.begin()
    history.write(*[b"%d" % number for number in range(9)])

    assert history.tracker.tracked_keys == 0
    with pytest.raises(TransactionExpired):
        history.commit(state, b"x")


# -- life time --------------------------------------------------------------------------------------------


def test_the_smallest_needed_sequence_number_is_that_of_the_oldest_reader(history: History) -> None:
    tracker = history.tracker
    assert tracker.min_active_seq() is None
    snapshot = tracker.begin_snapshot(90)
    state = history.begin()
    assert tracker.min_active_seq() == 90
    tracker.end(snapshot)
    assert tracker.min_active_seq() == 100
    tracker.end(state)
    tracker.end(state)

    assert tracker.min_active_seq() is None
    assert tracker.running == {}


def test_transactions_and_snapshots_left_open_expire(history: History) -> None:
    tracker = history.tracker
    forgotten = history.begin(deadline_ms=1000)
    snapshot = tracker.begin_snapshot(50, deadline_ms=2000)
    patient = history.begin()

    assert tracker.expire(999) == []
    assert tracker.expire(1000) == [forgotten]
    assert tracker.expire(5000) == [snapshot]
    assert snapshot.expired
    with pytest.raises(TransactionExpired, match="time to live"):
        history.commit(forgotten, b"x")
    assert tracker.min_active_seq() == 100
    history.commit(patient, b"x")


def test_an_ended_transaction_cannot_be_used_again(history: History) -> None:
    state = history.begin()
    history.tracker.end(state)

    with pytest.raises(InternalError):
        history.tracker.check(state)


def test_a_transaction_dropped_by_its_finalizer_ends_with_the_next_sweep_and_counts_as_no_expiry() -> None:
    tracker = ConflictTracker()
    dropped, kept = tracker.begin(3, "snapshot"), tracker.begin_snapshot(5)
    dropped.dropped = True
    assert tracker.expire(0) == []
    assert (dropped.ended, dropped.expired, kept.ended) == (True, False, False)
    assert (tracker.running, tracker.min_active_seq()) == ({}, 5)
