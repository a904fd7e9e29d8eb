"""Cutting a range out of a manifest: what every layer shows then, and which ids a former compaction job still finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import Manifest, Segment, SsTable
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.metadata.range_cut import cut_range, highest_run, overlapping_ssts, overlaps
from flagstone.types import KeyRange, RunId, Ulid

SPAN = 40


def key(number: int) -> bytes:
    return b"%02d" % number


spans = st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(lambda pair: (min(pair), max(pair)))
ranges = st.tuples(spans, st.booleans(), st.booleans()).map(
    lambda drawn: KeyRange(
        None if drawn[1] else key(drawn[0][0]), None if drawn[2] else key(drawn[0][1]) + b"\0"
    )
)


@st.composite
def trees(draw: st.DrawFn, ids: Iterator[int], run_ids: list[int]) -> tuple[Tree, list[SsTable]]:
    ssts: list[SsTable] = []

    def view(first: int, last: int) -> SstView:
        sst_id = Ulid(next(ids) << 80)
        ssts.append(SsTable(sst_id, SsTableInfo(key(first), key(last), 100, 10, 110, 0)))
        return SstView.whole(sst_id)

    runs = []
    for run_id in run_ids:
        edges = sorted(draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=8)))
        runs.append(SortedRun(RunId(run_id), tuple(view(low, high - 1) for low, high in pairwise(edges))))
    l0 = tuple(view(*span) for span in draw(st.lists(spans, max_size=5)))
    return Tree(tuple(reversed(l0)), tuple(runs)), ssts


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    ids = count(1000)
    found = sorted(draw(st.sets(st.integers(0, 30), max_size=6)), reverse=True)
    tree, ssts = draw(trees(ids, found[::2]))
    other, more = draw(trees(ids, found[1::2]))
    by_id = {sst.id: sst for sst in sorted([*ssts, *more], key=lambda sst: sst.id)}
    return Manifest(
        tree=tree, segments=(Segment(b"other", other),) if draw(st.booleans()) else (), ssts=by_id
    )


def described(manifest: Manifest) -> Manifest:
    """Without the SSTs that no view names."""
    named = {view.sst_id for view in manifest.views}
    return replace(manifest, ssts={sst_id: sst for sst_id, sst in manifest.ssts.items() if sst_id in named})


def layers(tree: Tree, manifest: Manifest) -> list[list[tuple[Ulid, frozenset[bytes]]]]:
    """For each layer from new to old the keys that each SST shows."""
    every = [key(number) for number in range(SPAN + 1)]
    found = []
    for views in [*((view,) for view in tree.l0), *(run.views for run in tree.runs)]:
        shown: dict[Ulid, frozenset[bytes]] = {}
        for view in views:
            keys = view.effective_range(manifest.sst(view).info)
            seen = frozenset(each for each in every if each in keys)
            assert not seen & shown.get(view.sst_id, frozenset())
            shown[view.sst_id] = shown.get(view.sst_id, frozenset()) | seen
        found.append(sorted((sst_id, seen) for sst_id, seen in shown.items() if seen))
    return [layer for layer in found if layer]


@given(manifests().map(described), st.lists(ranges, min_size=1, max_size=4))
def test_every_layer_loses_the_range_and_nothing_else(before: Manifest, cuts: list[KeyRange]) -> None:
    fresh = count(1)
    for keys in cuts:
        after = cut_range(before, keys, lambda ms: Ulid(ms << 80 | next(fresh)))
        check_manifest(after, before)
        assert decode_manifest(encode_manifest(after)) == after
        assert not overlaps(after, keys)
        assert bool(overlapping_ssts(before, keys)) is overlaps(before, keys)
        for was, now in zip(before.trees, after.trees, strict=True):
            expected = [
                sorted(
                    (sst_id, left)
                    for sst_id, seen in layer
                    if (left := frozenset(k for k in seen if k not in keys))
                )
                for layer in layers(was, before)
            ]
            assert layers(now, after) == [layer for layer in expected if layer]
            assert len(now.l0) <= len(was.l0)
        before = after


@given(manifests().map(described), st.lists(ranges, min_size=1, max_size=4))
def test_a_job_finds_its_sources_only_where_nothing_was_cut(before: Manifest, cuts: list[KeyRange]) -> None:
    fresh = count(1)
    first = before
    jobs = Compactions(
        jobs=tuple(
            Job(Ulid(number), TieredSpec((), (run_id,), run_id), JobStatus.COMPACTED)
            for number, run_id in enumerate(before.run_ids, 1)
        )
    )
    for keys in cuts:
        before = cut_range(before, keys, lambda ms: Ulid(ms << 80 | next(fresh)), job_run=highest_run(jobs))
    for was, now in zip(first.trees, before.trees, strict=True):
        old_l0, old_runs = {view.id: view for view in was.l0}, {run.id: run for run in was.runs}
        assert all(old_l0[view.id] == view for view in now.l0 if view.id in old_l0)
        assert all(old_runs[run.id] == run for run in now.runs if run.id in old_runs)
