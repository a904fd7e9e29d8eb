"""A database is split into ranges and united again many times: no row is lost and no metadata grows.

Manifests are enough for this: projections and unions never read an SST.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.clones.clone import Cloner
from flagstone.clones.origin import CloneSource
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, Segment, SsTable
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import KeyRange, RunId, Seq, Ulid

KEYS = [
    letter + rest
    for letter in (b"a", b"b")
    for rest in (
        b"",
        b"\0",
        b"\0\0",
        b"00",
        b"05",
        b"5",
        b"Z",
        b"\\",
        b"\\0",
        b"a",
        b"a\0",
        b"ab",
        b"\xfe",
        b"\xff",
        b"\xff\xff",
    )
]


@dataclass
class Shelf:
    """SSTs as sets of keys, and the manifests over them."""

    tables: dict[Ulid, set[bytes]] = field(default_factory=dict)
    ssts: dict[Ulid, SsTable] = field(default_factory=dict)

    def add(self, keys: set[bytes], *, last_known: bool = True) -> SstView:
        table_id = Ulid((1_700_000_000_000 + len(self.tables) << 80) + 7)
        last = max(keys) if last_known else None
        info = SsTableInfo(min(keys), last, 100, 10, 100, 0)
        self.tables[table_id] = keys
        self.ssts[table_id] = SsTable(table_id, info)
        return SstView.whole(table_id)

    def contents(self, manifest: Manifest) -> dict[bytes, Ulid]:
        """Which SST serves each key: the newest one that has it and shows it."""
        found: dict[bytes, Ulid] = {}
        for tree in manifest.trees:
            for view in tree.views:
                shown = view.effective_range(manifest.sst(view).info)
                for key in self.tables[view.sst_id]:
                    if key in shown:
                        found.setdefault(key, view.sst_id)
        return found


def some(keys: list[bytes]) -> st.SearchStrategy[set[bytes]]:
    return st.sets(st.sampled_from(keys), min_size=1)


@st.composite
def trees(draw: st.DrawFn, shelf: Shelf, keys: list[bytes], run_ids: Iterator[int]) -> Tree:
    # Old SSTs first: ids ascend with age, as they do in a database.
    runs = []
    for _ in range(draw(st.integers(0, 3))):
        chosen = sorted(draw(some(keys)))
        borders = sorted(draw(st.sets(st.integers(1, len(chosen)), max_size=2)) | {0, len(chosen)})
        pieces = [set(chosen[start:stop]) for start, stop in pairwise(borders)]
        runs.append(SortedRun(RunId(next(run_ids)), tuple(shelf.add(piece) for piece in pieces)))
    l0 = [shelf.add(draw(some(keys))) for _ in range(draw(st.integers(0, 4)))]
    return Tree(tuple(reversed(l0)), tuple(reversed(runs)))


@st.composite
def databases(draw: st.DrawFn) -> tuple[Shelf, Manifest]:
    shelf = Shelf()
    run_ids = iter(range(0, 100, draw(st.integers(1, 3))))
    if draw(st.booleans()):
        segments = tuple(
            Segment(prefix, draw(trees(shelf, [key for key in KEYS if key.startswith(prefix)], run_ids)))
            for prefix in (b"a", b"b")
        )
        segments = tuple(segment for segment in segments if not segment.tree.empty)
        return shelf, Manifest(ssts=shelf.ssts, segments=segments, segment_extractor_name="first")
    return shelf, Manifest(ssts=shelf.ssts, tree=draw(trees(shelf, KEYS, run_ids)), last_l0_seq=Seq(9))


def parts_of(borders: list[bytes]) -> list[KeyRange]:
    return [KeyRange(start, stop) for start, stop in pairwise([None, *borders, None])]


borders = st.lists(
    st.sampled_from([*KEYS, b"\0", b"a050", b"a\\\\", b"b05\x00", b"\xff"]),
    unique=True,
    min_size=1,
    max_size=4,
).map(sorted)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=settings.default.max_examples // 2 if settings.default else 10)
@given(databases(), st.lists(borders, min_size=1, max_size=4))
def test_a_database_split_and_united_any_number_of_times_keeps_its_rows(
    database: tuple[Shelf, Manifest], rounds: list[list[bytes]]
) -> None:
    shelf, first = database
    store, clock = MemoryStore(), VirtualClock()
    cloner = Cloner(store, clock=clock, ids=Ids(1, clock=clock))
    ManifestStore(store, DbPaths("whole-0"), clock=clock).create_next(first, None)
    expected = shelf.contents(first)
    lenders, placed = 0, set[UUID | None]()

    for number, cuts in enumerate(rounds):
        parts = parts_of(cuts)
        names = [f"part-{number}-{at}" for at in range(len(parts))]
        seen: dict[bytes, Ulid] = {}
        for name, keys in zip(names, parts, strict=True):
            part = cloner.clone(name, [CloneSource(f"whole-{number}", None, keys)]).value
            inside = shelf.contents(part)
            assert inside == {key: table for key, table in expected.items() if key in keys}
            seen |= inside
            placed |= {db.final_checkpoint_id for db in part.external_dbs}
        assert seen == expected

        whole = cloner.clone(f"whole-{number + 1}", [CloneSource(name) for name in names]).value

        assert shelf.contents(whole) == expected
        assert whole.last_l0_seq == first.last_l0_seq
        assert sum(1 for _ in whole.views) <= sum(1 for _ in first.views)
        assert sum(1 for _ in whole.run_ids) <= sum(1 for _ in first.run_ids)
        # One entry per checkpoint that the first split made, and no more after any number of repetitions.
        assert {db.path for db in whole.external_dbs} == ({"whole-0"} if first.ssts else set())
        assert len(whole.external_dbs) <= (len(parts) if number == 0 else lenders)
        lenders = len(whole.external_dbs)
        placed |= {db.final_checkpoint_id for db in whole.external_dbs}
        assert len({view.id for view in whole.views}) == sum(1 for _ in whole.views)
        clock.advance(1_000)

    lender = ManifestStore(store, DbPaths("whole-0"), clock=clock).require_latest().value
    assert {entry.id for entry in lender.checkpoints if entry.expires_s is None} == placed
