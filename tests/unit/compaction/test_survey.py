"""What a survey finds out about the runs of a database, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from flagstone.compaction.dead_rows import DeadRows, ViewStats
from flagstone.compaction.lines import lines_of
from flagstone.compaction.survey import Survey, summarize
from flagstone.config.settings import SchedulerOptions
from flagstone.errors import Unavailable
from flagstone.format.sst import BlockIndex
from flagstone.lsm.tree import BytesRange
from flagstone.metadata.compactions import TieredSpec
from flagstone.metadata.manifest import ExternalDb
from flagstone.runtime.pool import IoPool
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import FaultyStore
from flagstone.types import TOMBSTONE, VALUE, EntryTuple, KeyRange, RunId
from kit.executor import PATHS, SMALL, ExecutorRig


def rows(first: int, last: int, *, expires: int | None = None, size: int = 100) -> list[EntryTuple]:
    return [(b"k%04d" % at, at + 1, VALUE, b"v" * size, 1, expires) for at in range(first, last)]


def deletes(first: int, last: int) -> list[EntryTuple]:
    return [(b"k%04d" % at, 5000 + at, TOMBSTONE, b"", 1, None) for at in range(first, last)]


def surveyed(rig: ExecutorRig) -> Survey:
    survey = Survey(rig.store, PATHS, pool=IoPool(max_workers=0))
    while survey.read(rig.manifest):
        pass
    return survey


def picked(rig: ExecutorRig, share: float = 0.3) -> TieredSpec | None:
    dead = DeadRows(rig.manifest, surveyed(rig).stats, SchedulerOptions(min_dead_share=share))
    (line,) = lines_of(rig.manifest, [])
    return dead.pick(line)


def test_a_whole_view_shows_all_bytes_of_its_blocks_and_counts_rows_and_tombstones() -> None:
    rig = ExecutorRig(options=replace(SMALL, block_bytes=1024))
    view = rig.add_sst([*rows(0, 300, expires=70), *deletes(300, 400)])
    rig.set_tree(runs=[(0, [view])])

    (stats,) = surveyed(rig).stats.values()

    assert stats.shown_bytes == rig.manifest.sst(view).info.filter_offset
    assert (stats.rows, stats.tombstones) == (400, 100)
    assert stats.expired_share(69) == 0
    assert stats.expired_share(70) > 0.5


def test_a_cut_view_shows_the_blocks_of_its_range_only() -> None:
    rig = ExecutorRig(options=replace(SMALL, block_bytes=1024))
    view = rig.add_sst(rows(0, 400))
    shown = BytesRange.of(KeyRange(b"k0000", b"k0040"))
    rig.set_tree(runs=[(0, [replace(view, visible_range=shown)])])

    (stats,) = surveyed(rig).stats.values()

    assert 40 <= stats.rows < 60
    assert stats.shown_bytes < rig.manifest.sst(view).info.filter_offset / 6
    assert picked(rig) == TieredSpec((), (RunId(0),), RunId(0))


def test_two_parts_of_one_sst_hide_what_neither_shows() -> None:
    rig = ExecutorRig(options=replace(SMALL, block_bytes=1024))
    view = rig.add_sst(rows(0, 400))

    def parts(stop: bytes) -> None:
        low, high = BytesRange.of(KeyRange(None, b"k0150")), BytesRange.of(KeyRange(stop, None))
        second = replace(view, id=type(view.id)(view.id + 1), visible_range=high)
        rig.set_tree(runs=[(0, [replace(view, visible_range=low), second])])

    parts(b"k0160")
    assert picked(rig) is None
    parts(b"k0350")
    assert picked(rig) == TieredSpec((), (RunId(0),), RunId(0))


def test_hidden_bytes_of_an_sst_that_another_run_shows_are_not_free() -> None:
    rig = ExecutorRig(options=replace(SMALL, block_bytes=1024))
    view = rig.add_sst(rows(0, 400))
    low = replace(view, visible_range=BytesRange.of(KeyRange(None, b"k0050")))
    high = replace(view, id=type(view.id)(view.id + 1), visible_range=BytesRange.of(KeyRange(b"k0350", None)))
    rig.set_tree(runs=[(4, [high]), (0, [low])])

    assert picked(rig) is None


def test_dead_rows_of_a_lender_are_not_free() -> None:
    rig = ExecutorRig(options=replace(SMALL, block_bytes=1024))
    rig.set_barrier(0, clock_ms=100)
    view = rig.add_sst(rows(0, 400, expires=90), owner="lender")
    cut = replace(view, visible_range=BytesRange.of(KeyRange(None, b"k0050")))
    rig.set_tree(runs=[(0, [cut])])
    assert surveyed(rig).stats == {}  # the manifest does not name the lender yet

    lender = ExternalDb("lender", UUID(int=1), UUID(int=2), (view.sst_id,))
    rig.manifest = replace(rig.manifest, external_dbs=(lender,))
    assert len(surveyed(rig).stats) == 1
    assert picked(rig) is None


def test_tombstones_that_delete_nothing_older_do_not_count_as_deletes() -> None:
    rig = ExecutorRig(options=replace(SMALL, block_bytes=1024))
    old = rig.add_sst(rows(0, 400))
    rig.set_tree(runs=[(4, [rig.add_sst(deletes(0, 300))]), (0, [old])])
    assert picked(rig) == TieredSpec((), (RunId(4), RunId(0)), RunId(0))
    rig.set_tree(runs=[(4, [rig.add_sst(deletes(500, 800))]), (0, [old])])
    assert picked(rig) is None


def test_a_survey_reads_an_sst_once_and_forgets_it_with_its_view() -> None:
    store = FaultyStore(MemoryStore())
    rig = ExecutorRig(store=store, options=replace(SMALL, block_bytes=1024))
    old, new = rig.add_sst(rows(0, 400)), rig.add_sst(rows(0, 30))
    rig.set_tree([rig.add_sst(rows(0, 5))], [(4, [new]), (0, [old])])
    survey = Survey(store, PATHS, pool=IoPool(max_workers=0))
    before = len(store.calls)
    assert not survey.read(rig.manifest)
    assert set(survey.stats) == {old, new}
    read = len(store.calls) - before
    assert read <= 2 * 5  # index and statistics, and four blocks at most

    assert not survey.read(replace(rig.manifest))
    assert len(store.calls) - before == read
    rig.set_tree(runs=[(0, [old])])
    assert not survey.read(rig.manifest)
    assert set(survey.stats) == {old}


def test_many_new_ssts_are_read_a_few_at_a_time() -> None:
    rig = ExecutorRig()
    views = [rig.add_sst(rows(10 * at, 10 * at + 5)) for at in range(40)]
    rig.set_tree(runs=[(0, views)])
    survey = Survey(rig.store, PATHS, pool=IoPool(max_workers=0))

    known = []
    while survey.read(rig.manifest):
        known.append(len(survey.stats))
    assert known == [16, 32]
    assert len(survey.stats) == 40


def test_of_a_long_run_some_ssts_are_read_and_stand_for_the_others() -> None:
    rig = ExecutorRig()
    rig.set_barrier(0, clock_ms=100)
    views = [rig.add_sst(rows(3 * at, 3 * at + 3, expires=90 if at % 3 else 110)) for at in range(200)]
    cut = replace(views[1], visible_range=BytesRange.of(KeyRange(b"k0003", b"k0004")))
    rig.set_tree(runs=[(0, [views[0], cut, *views[2:]])])

    known = surveyed(rig).stats
    assert len(known) == 51
    assert cut in known

    # Two thirds have expired, and the sample shows as many.
    assert picked(rig, share=0.6) == TieredSpec((), (RunId(0),), RunId(0))
    assert picked(rig, share=0.75) is None


def test_an_sst_that_is_gone_or_damaged_stays_unknown() -> None:
    rig = ExecutorRig()
    gone, damaged, whole = (rig.add_sst(rows(at, at + 5)) for at in (0, 10, 20))
    rig.set_tree(runs=[(0, [gone, damaged, whole])])
    rig.store.delete(PATHS.sst(gone.sst_id))
    rig.store.put(PATHS.sst(damaged.sst_id), b"\0" * 5000)

    survey = Survey(rig.store, PATHS, pool=IoPool(max_workers=0))

    assert not survey.read(rig.manifest)
    assert set(survey.stats) == {whole}
    assert not survey.read(rig.manifest)


def test_a_survey_goes_on_when_the_store_answers_again() -> None:
    rig = ExecutorRig()
    rig.set_tree(runs=[(0, [rig.add_sst(rows(0, 5))])])
    down = Down(rig.store)
    survey = Survey(down, PATHS, pool=IoPool(max_workers=0))  # type: ignore[arg-type]
    assert not survey.read(rig.manifest)
    assert not survey.stats
    down.answers = True
    assert not survey.read(rig.manifest)
    assert len(survey.stats) == 1


class Down:
    """A store that raises until it `answers`."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.answers = False

    def __getattr__(self, name: str) -> object:
        if not self.answers:
            raise Unavailable("down")
        return getattr(self.inner, name)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_without_statistics_rows_are_scaled_from_the_sample(share: float) -> None:
    index = BlockIndex([0, 100, 200, 300], [100, 200, 300, 400], [b"a", b"b", b"c", b"d"])
    few = round(8 * share)
    sample = [*deletes(0, few), *rows(few, 8, expires=9)]

    stats = summarize(index, None, 0, 4, sample, blocks=2)

    assert stats == ViewStats(400, 16, 2 * few, 8, (9,) * (8 - few))
