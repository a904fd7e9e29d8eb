"""`ViewBuilder`: a view of the next manifest reuses the layers that did not change, and drops the SSTs that left."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import ExternalDb, Manifest
from flagstone.types import KeyRange, RunId, Ulid
from kit.ssts import Rig, put


def opened(rig: Rig, view: SstView) -> bool:
    """Whether the SST of a view is still open: a dropped one would be opened as another object."""
    return view.sst_id in rig.sst_store._ssts


def without(manifest: Manifest, tree: Tree) -> Manifest:
    used = {view.sst_id for view in tree.views}
    return replace(
        manifest, tree=tree, ssts={sst_id: sst for sst_id, sst in manifest.ssts.items() if sst_id in used}
    )


def test_a_flush_reuses_every_layer_and_drops_no_sst() -> None:
    rig = Rig()
    run, old, new = rig.add([put(1)]), rig.add([put(2)]), rig.add([put(3)])
    before = rig.view(rig.tree(l0=[old], runs=[[run]]))
    after = rig.view(rig.tree(l0=[new, old], runs=[[run]]))
    assert after.layers[1:] == before.layers
    assert all(opened(rig, view) for view in (run, old, new))


def test_compacted_ssts_are_dropped() -> None:
    rig = Rig()
    run, l0, output = rig.add([put(1)]), rig.add([put(2)]), rig.add([put(1), put(2)])
    manifest = rig.manifest(rig.tree(l0=[l0], runs=[[run]]))
    rig.builder.build(manifest)
    rig.builder.build(without(manifest, rig.tree(runs=[[output]])))
    assert [opened(rig, view) for view in (run, l0, output)] == [False, False, True]


def test_an_sst_with_another_view_is_not_dropped() -> None:
    rig = Rig()
    whole = rig.add([put(1), put(5)])
    part = replace(rig.add([put(9)], visible=KeyRange(b"%08d" % 3, None)), id=Ulid(99), sst_id=whole.sst_id)
    manifest = rig.manifest(rig.tree(l0=[whole], runs=[[part]]))
    rig.builder.build(manifest)
    rig.builder.build(without(manifest, rig.tree(runs=[[part]])))
    assert opened(rig, whole)


def test_a_run_with_other_views_under_its_id_gets_a_new_layer() -> None:
    rig = Rig()
    first, second = rig.add([put(1)]), rig.add([put(2)])
    manifest = rig.manifest(Tree((), (SortedRun(RunId(1), (first, second)),)))
    before = rig.builder.build(manifest)
    after = rig.builder.build(without(manifest, Tree((), (SortedRun(RunId(1), (second,)),))))
    assert after.layers != before.layers
    assert [opened(rig, view) for view in (first, second)] == [False, True]


def test_borrowed_ssts_have_paths_in_the_database_that_owns_them() -> None:
    rig = Rig()
    own, borrowed, later = rig.add([put(1)]), rig.add([put(2)]), rig.add([put(3)])
    lender = ExternalDb("lender", UUID(int=1), None, (borrowed.sst_id,))
    manifest = replace(rig.manifest(rig.tree(l0=[borrowed, own])), external_dbs=(lender,))
    first = rig.builder.build(manifest)
    second = rig.builder.build(replace(manifest, tree=rig.tree(l0=[later, borrowed, own])))
    paths = [layer.parts()[2][0].path.partition("/")[0] for layer in (*first.layers, *second.layers)]
    assert paths == ["lender", "db", "db", "lender", "db"]
