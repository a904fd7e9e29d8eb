"""Reads of former states: exact, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flagstone
from flagstone.db.reader.as_of import (
    Base,
    Moment,
    check_as_of,
    plan_base,
    readable_from,
    sequence_at,
    time_of,
)
from flagstone.errors import InvalidRequest
from flagstone.lsm.operators import Concatenate
from flagstone.lsm.sequence import SequenceTracker
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import DbPaths
from flagstone.types import MERGE, TOMBSTONE, VALUE, KeyRange, Seq, WalId
from kit.databases import ModelledDatabase

START_MS = 1_700_000_000_000


def at(second: int, micros: int = 0) -> datetime:
    return datetime.fromtimestamp(second, UTC) + timedelta(microseconds=micros)


# -- sequence and time ------------------------------------------------------------------------------------

TRACKED = Manifest(sequence_tracker=SequenceTracker((10, 20, 30), (1000, 1060, 1120)))


@pytest.mark.parametrize(
    ("moment", "down", "up"),
    [
        (at(999), None, 10),
        (at(1000), 10, 10),
        (at(1000, 1), 10, 20),
        (at(1059, 999_999), 10, 20),
        (at(1060), 20, 20),
        (at(9999), 30, None),
    ],
)
def test_sequence_at_rounds_a_time_down_or_up_to_a_tracked_sequence_number(
    moment: datetime, down: int | None, up: int | None
) -> None:
    assert sequence_at(TRACKED, moment) == down
    assert sequence_at(TRACKED, moment, "up") == up


@pytest.mark.parametrize(
    ("sequence", "down", "up"),
    [(9, None, 1000), (10, 1000, 1000), (11, 1000, 1060), (30, 1120, 1120), (31, 1120, None)],
)
def test_time_of_rounds_a_sequence_number_down_or_up_to_a_tracked_time(
    sequence: int, down: int | None, up: int | None
) -> None:
    assert time_of(TRACKED, sequence) == (None if down is None else at(down))
    assert time_of(TRACKED, sequence, "up") == (None if up is None else at(up))


def test_a_time_in_another_zone_gives_the_same_sequence_number() -> None:
    tokyo = at(1060).astimezone(timezone(timedelta(hours=9)))

    assert sequence_at(TRACKED, tokyo) == 20


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no time zone"):
        sequence_at(TRACKED, datetime(2026, 1, 1))
    with pytest.raises(InvalidRequest, match="sequence number"):
        time_of(TRACKED, -1)
    with pytest.raises(InvalidRequest, match="'down' or 'up'"):
        time_of(TRACKED, 1, "nearest")  # type: ignore[arg-type]


# -- which state shows a moment ---------------------------------------------------------------------------


def state(number: int, *, flushed: int, barrier: int, tick: int = 0, saved: bool = True) -> Base:
    manifest = Manifest(
        last_l0_seq=Seq(flushed), recent_snapshot_min_seq=Seq(barrier), last_l0_clock_tick=tick
    )
    return Base(Versioned(number, manifest), flagstone.runtime.ids.SYSTEM_IDS.uuid() if saved else None)


def test_ssts_are_readable_from_the_snapshot_minimum_on() -> None:
    assert readable_from(Manifest(last_l0_seq=Seq(9), recent_snapshot_min_seq=Seq(5))) == 5
    assert readable_from(Manifest(last_l0_seq=Seq(9), recent_snapshot_min_seq=Seq(9))) == 9


def test_ssts_of_a_union_are_readable_only_at_their_newest_sequence_number() -> None:
    assert readable_from(Manifest(last_l0_seq=Seq(9), recent_snapshot_min_seq=Seq(0))) == 9


def test_the_newest_base_that_shows_a_sequence_number_is_chosen() -> None:
    old, middle, latest = (
        state(1, flushed=10, barrier=10),
        state(5, flushed=20, barrier=15),
        state(9, flushed=30, barrier=30, saved=False),
    )
    bases = [latest, middle, old]

    assert plan_base(bases, Moment(30))[0] is latest
    assert plan_base(bases, Moment(29))[0] is middle
    assert plan_base(bases, Moment(15))[0] is middle
    assert plan_base(bases, Moment(14))[0] is old
    with pytest.raises(InvalidRequest, match=r"number 9 cannot be shown.*begins at sequence number 10"):
        plan_base(bases, Moment(9))


def test_a_time_is_read_from_a_base_whose_ssts_are_not_newer() -> None:
    old, latest = (
        state(1, flushed=10, barrier=10, tick=1000),
        state(9, flushed=30, barrier=30, tick=3000, saved=False),
    )

    assert plan_base([latest, old], Moment(time_ms=3000))[0] is latest
    assert plan_base([latest, old], Moment(time_ms=2999))[0] is old
    with pytest.raises(InvalidRequest, match="no sequence number is known"):
        plan_base([latest, old], Moment(time_ms=999))


def test_a_time_before_all_ssts_is_found_in_the_sequence_tracker() -> None:
    manifest = replace(
        TRACKED, last_l0_seq=Seq(40), recent_snapshot_min_seq=Seq(15), last_l0_clock_tick=2_000_000
    )
    base = Base(Versioned(3, manifest), None)

    assert plan_base([base], Moment(time_ms=1_061_000)) == (base, Moment(20))


def test_older_bases_are_not_loaded_when_a_newer_one_suffices() -> None:
    latest = state(9, flushed=30, barrier=30, tick=3000, saved=False)

    def bases() -> Iterator[Base]:
        yield latest
        raise AssertionError("an older base was loaded")

    assert plan_base(bases(), Moment(30))[0] is latest
    assert plan_base(bases(), Moment(time_ms=3000))[0] is latest


def test_without_a_base_every_moment_is_refused() -> None:
    for moment in (Moment(1), Moment(time_ms=1)):
        with pytest.raises(InvalidRequest, match="no state to begin with"):
            plan_base([], moment)


@pytest.mark.parametrize("wrong", [True, -1, 2**64, "yesterday", 1.5, None])
def test_an_as_of_that_is_no_moment_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="as_of is"):
        check_as_of(wrong, now_ms=0)  # type: ignore[arg-type]


def test_an_as_of_in_the_future_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not come yet"):
        check_as_of(at(100), now_ms=99_999)


# -- reading former states --------------------------------------------------------------------------------


class History(ModelledDatabase):
    """A database, its model, and readers of its former states."""

    logged = True
    """Whether the database has a WAL."""

    def __init__(self) -> None:
        super().__init__(step_ms=10)

    def make_durable(self) -> None:
        """Put all rows on the store: into the WAL, or where there is none into SSTs."""
        self.db.flush("wal" if self.logged else "memtable")

    def read(self, as_of: int | datetime, **options: object) -> list[flagstone.Row]:
        reader = flagstone.open_reader(
            "db",
            store=self.store,
            as_of=as_of,
            clock=self.clock,
            merge_operator=Concatenate(),
            **options,  # type: ignore[arg-type]
        )
        with reader:
            rows = list(reader.scan().rows())
            assert [reader.get_row(row.key) for row in rows] == rows
            return rows

    def expected(self, seq: int) -> list[flagstone.Row]:
        return self.model.scan(KeyRange(), seq, self.clock.now_ms())


@pytest.fixture
def history() -> History:
    return History()


@pytest.mark.slow
def test_every_moment_since_a_checkpoint_is_read_from_it_and_the_wal(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    history.db.checkpoint()
    first = history.commit(b"a", VALUE, b"2")
    for number in range(20):
        history.commit(b"%d" % number, VALUE, b"x")
        history.db.flush("wal" if number % 3 else "memtable")
    last = history.commit(b"a", TOMBSTONE, b"")
    history.db.flush()
    history.upkeep.compact(lifetime=None)

    for seq in range(first - 1, last + 1):
        assert history.read(seq) == history.expected(seq)
        assert history.read(at(0) + timedelta(milliseconds=history.times[seq])) == history.expected(seq)
        assert history.read(seq, mode="latest") == history.expected(seq)


def test_a_moment_before_every_checkpoint_is_refused(history: History) -> None:
    early = history.commit(b"a", VALUE, b"1")
    history.commit(b"a", VALUE, b"2")
    history.db.checkpoint()

    with pytest.raises(InvalidRequest, match="cannot be shown"):
        history.read(early)


def test_a_sequence_number_not_written_yet_is_refused(history: History) -> None:
    last = history.commit(b"a", VALUE, b"1")
    history.db.flush("wal")

    assert history.read(last) == history.expected(last)
    with pytest.raises(InvalidRequest, match="not come yet"):
        history.read(last + 1)


def test_a_moment_whose_wal_files_are_gone_is_refused(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    history.db.checkpoint()
    lost = history.commit(b"a", VALUE, b"2")
    history.commit(b"b", VALUE, b"2")
    history.db.flush()
    last = history.commit(b"c", VALUE, b"2")
    history.db.flush()
    manifest = ManifestStore(history.store, DbPaths("db")).require_latest().value
    for wal_id in range(1, manifest.replay_after_wal_id):
        history.store.delete(DbPaths("db").wal(WalId(wal_id)))

    with pytest.raises(InvalidRequest, match="keep the WAL with a retention checkpoint"):
        history.read(lost)
    assert history.read(last) == history.expected(last)


def test_a_moment_after_rows_that_never_were_in_the_wal_is_refused(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    history.db.checkpoint()
    history.db.close()
    history.db = history.open(wal_enabled=False)
    unlogged = history.commit(b"a", VALUE, b"unlogged")
    history.db.close()
    history.db = history.open()
    logged = history.commit(b"b", VALUE, b"logged")
    history.db.flush()
    history.commit(b"c", VALUE, b"later")
    history.db.flush()

    for seq in (unlogged, logged):
        with pytest.raises(InvalidRequest, match=r"not in the WAL|before sequence number"):
            history.read(seq)


def test_an_open_snapshot_keeps_its_moment_for_other_processes(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    history.db.flush()
    seq = history.commit(b"a", VALUE, b"2")
    with history.db.snapshot():
        for value in (b"3", b"4"):
            history.commit(b"a", VALUE, value)
            history.db.flush()
        history.upkeep.compact(lifetime=None)

        assert history.read(seq) == history.expected(seq)


def test_a_given_checkpoint_is_used_as_the_only_base(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    checkpoint = history.db.checkpoint()
    seq = history.commit(b"a", VALUE, b"2")
    history.db.flush()
    history.db.checkpoint()
    objects = {meta.path for meta in history.store.list("")}

    assert history.read(seq - 1, checkpoint=checkpoint.id) == history.expected(seq - 1)
    assert history.read(seq, checkpoint=checkpoint.id) == history.expected(seq)
    assert {meta.path for meta in history.store.list("")} == objects


def test_a_retention_checkpoint_is_refused_as_a_base(history: History) -> None:
    seq = history.commit(b"a", VALUE, b"1")
    history.db.flush()
    list(flagstone.WalReader("db", store=history.store, pin="p", clock=history.clock).follow(timeout_s=0))
    (retention,) = ManifestStore(history.store, DbPaths("db")).require_latest().value.checkpoints

    assert history.read(seq) == history.expected(seq)
    with pytest.raises(InvalidRequest, match="no state to begin with"):
        history.read(seq, checkpoint=retention.id)
    with pytest.raises(InvalidRequest, match="only keeps the WAL for the consumer 'p'"):
        flagstone.open_reader("db", store=history.store, checkpoint=retention.id)


def test_a_reader_of_a_former_state_holds_a_checkpoint_until_it_is_closed(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    short = history.db.checkpoint(lifetime=timedelta(seconds=60))
    seq = history.commit(b"a", VALUE, b"2")
    history.db.flush()
    reader = flagstone.open_reader("db", store=history.store, as_of=seq - 1, clock=history.clock)
    history.upkeep.compact(lifetime=None)
    manifests = ManifestStore(history.store, DbPaths("db"), clock=history.clock)

    held = [entry for entry in manifests.require_latest().value.checkpoints if entry.id != short.id]
    assert [entry.manifest_id for entry in held] == [short.manifest_id]
    history.clock.advance(301_000)
    reader.refresh()
    history.clock.advance(301_000)
    history.upkeep.collect()

    assert reader.get(b"a") == b"1"
    reader.close()
    assert [entry.id for entry in manifests.require_latest().value.checkpoints] == [short.id]


def test_a_moment_before_a_restore_is_not_read_from_the_restored_state(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    checkpoint = history.db.checkpoint()
    given_up = history.commit(b"a", VALUE, b"2")
    history.db.flush()
    history.db.close()
    history.clock.advance(5000)
    before = at(0) + timedelta(milliseconds=history.clock.now_ms() - 1000)
    flagstone.Admin("db", store=history.store, clock=history.clock).restore(checkpoint.id)
    history.clock.advance(5000)
    history.db = history.open()
    after = history.commit(b"b", VALUE, b"3")
    history.db.flush()

    assert [row.value for row in history.read(given_up)] == [b"2"]
    assert [row.value for row in history.read(after)] == [b"1", b"3"]
    with pytest.raises(InvalidRequest, match="an older state was restored"):
        history.read(before)
    for seq in range(given_up + 1, after + 1):
        with pytest.raises(InvalidRequest):
            history.read(seq, checkpoint=checkpoint.id)


# -- snapshots of an open database ------------------------------------------------------------------------


def test_a_snapshot_as_of_an_unflushed_sequence_number_has_its_rows(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    history.db.flush()
    seqs = [history.commit(b"a", VALUE, b"%d" % number) for number in range(2, 6)]

    for seq in seqs:
        with history.db.snapshot(as_of=seq) as snapshot:
            assert snapshot.seq == seq
            assert list(snapshot.scan().rows()) == history.expected(seq)


def test_a_snapshot_as_of_a_former_sequence_number_keeps_its_rows(history: History) -> None:
    history.commit(b"a", VALUE, b"1")
    history.db.flush()
    seq = history.commit(b"a", VALUE, b"2")
    history.commit(b"a", MERGE, b"+")
    with history.db.snapshot(as_of=seq) as snapshot:
        history.db.flush()
        history.commit(b"a", VALUE, b"3")
        history.db.flush()
        history.upkeep.compact(lifetime=None)
        history.upkeep.collect()

        assert list(snapshot.scan().rows()) == history.expected(seq)


def test_a_snapshot_as_of_a_dropped_or_future_sequence_number_is_refused(history: History) -> None:
    seq = history.commit(b"a", VALUE, b"1")
    history.commit(b"a", VALUE, b"2")
    history.db.flush()

    with pytest.raises(InvalidRequest, match=r"only sequence number 2 and later.*open_reader"):
        history.db.snapshot(as_of=seq)
    with pytest.raises(InvalidRequest, match="not come yet"):
        history.db.snapshot(as_of=99)
    with pytest.raises(InvalidRequest, match="open_reader takes times"):
        history.db.snapshot(as_of=at(0))  # type: ignore[arg-type]


# -- random histories -------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(
        st.just("commit"),
        st.sampled_from([b"\0", b"0", b"a", b"a\\", b"\xff"]),
        st.sampled_from([VALUE, VALUE, TOMBSTONE, MERGE]),
        st.binary(min_size=1, max_size=2),
    ),
    st.tuples(st.just("flush"), st.sampled_from(["wal", "memtable"])),
    st.tuples(st.just("compact"), st.booleans()),
    st.tuples(st.just("checkpoint"), st.sampled_from(["all", "durable"])),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("end")),
    st.tuples(st.just("reopen"), st.booleans()),
    st.tuples(st.just("collect")),
)


@pytest.mark.slow
@settings(
    max_examples=settings.default.max_examples // 2,  # type: ignore[union-attr]
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
)
@given(steps=st.lists(STEPS, min_size=5, max_size=30))
def test_every_sequence_number_is_read_exactly_or_refused(steps: list[tuple[object, ...]]) -> None:
    history, snapshots = History(), ExitStack()
    history.commit(b"z", VALUE, b"an SST needs a row")
    with snapshots:
        for step in steps:
            _perform(history, snapshots, step)
        history.make_durable()
        for seq in range(history.model.last_seq + 1):
            time = at(0) + timedelta(milliseconds=history.times.get(seq, START_MS))
            with suppress(InvalidRequest):
                assert history.read(seq, mode="latest") == history.expected(seq)
            with suppress(InvalidRequest):
                # A time before all SSTs may be rounded down, never up.
                assert history.read(time, mode="latest") in [history.expected(s) for s in range(seq + 1)]
        assert history.read(history.model.last_seq) == history.expected(history.model.last_seq)
    history.db.close()


def _perform(history: History, snapshots: ExitStack, step: tuple[object, ...]) -> None:
    match step:
        case ("commit", bytes(key), int(kind), bytes(value)):
            history.commit(key, kind, value)
        case ("flush", kind):
            if kind == "wal":
                history.make_durable()
            else:
                history.db.flush()
        case ("compact", bool(kept)):
            if next(iter(history.db.manifest().views), None) is not None:
                history.upkeep.compact(lifetime=timedelta(seconds=900) if kept else None)
                history.make_durable()
        case ("checkpoint", scope):
            history.db.checkpoint(scope=scope)  # type: ignore[arg-type]
        case ("snapshot",):
            snapshots.enter_context(history.db.snapshot())
        case ("end",):
            snapshots.pop_all().close()
        case ("reopen", bool(logged)):
            snapshots.pop_all().close()
            history.db.close()
            history.db, history.logged = history.open(wal_enabled=logged), logged
        case ("collect",):
            admin = flagstone.Admin("db", store=history.store, clock=history.clock)
            admin.collect_garbage(kinds=["wal", "manifest"], min_age=timedelta(0))
