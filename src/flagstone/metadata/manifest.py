"""The manifest: the whole state of a database at one moment, in one value.

Edits are pure functions from one manifest to the next. They are applied to the manifest that is the latest when the
write wins, possibly more than once, so they state what must be true afterwards and assume nothing about what was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from uuid import UUID

from flagstone.errors import InternalError
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm import tree as trees
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import SstView, Tree
from flagstone.types import ManifestId, RunId, Seq, Ulid, WalId

NO_CLOCK_TICK: Final = -(2**63)
"""`last_l0_clock_tick` of a database that has never flushed."""

NO_WAL: Final = WalId(0)
NO_SEQ: Final = Seq(0)
"""WAL ids and sequence numbers start at 1."""

SEQ_GAP: Final = 1 << 36
"""The gap a bulk load leaves above the last sequence number: the writer may use that many while the load runs."""


@dataclass(frozen=True, slots=True)
class SsTable:
    """One SST: its id, where its parts are, and the row format of its blocks (1 or 2)."""

    id: Ulid
    info: SsTableInfo
    format_version: int = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """All keys that start with `prefix`, in a tree of their own. No prefix starts with another one."""

    prefix: bytes
    tree: Tree = field(default_factory=Tree)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Keeps one manifest, and every object it refers to, from garbage collection. Times are Unix seconds."""

    id: UUID
    manifest_id: ManifestId
    created_s: int
    expires_s: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ExternalDb:
    """Another database of the same store whose SSTs this one borrows.

    `final_checkpoint_id` is the checkpoint that keeps them there; `path` has no leading slash.
    """

    path: str
    source_checkpoint_id: UUID
    final_checkpoint_id: UUID | None
    sst_ids: tuple[Ulid, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The state of a database. `ssts` holds exactly the SSTs that some view refers to, and is never mutated.

    With a segment extractor the data is in `segments` and `tree` stays empty. `wal_object_store_uri` occurs
    only in manifests of old releases and is not written again.

    `checked` is not stored: False if the manifest, or the one that edits began with, was read without a checksum.
    """

    initialized: bool = True
    writer_epoch: int = 0
    compactor_epoch: int = 0
    replay_after_wal_id: WalId = NO_WAL
    wal_id_last_seen: WalId = NO_WAL
    ssts: Mapping[Ulid, SsTable] = field(default_factory=dict)
    tree: Tree = field(default_factory=Tree)
    segments: tuple[Segment, ...] = ()
    segment_extractor_name: str | None = None
    last_l0_clock_tick: int = NO_CLOCK_TICK
    last_l0_seq: Seq = NO_SEQ
    recent_snapshot_min_seq: Seq = NO_SEQ
    sequence_tracker: SequenceTracker = field(default_factory=SequenceTracker)
    checkpoints: tuple[Checkpoint, ...] = ()
    external_dbs: tuple[ExternalDb, ...] = ()
    wal_object_store_uri: str | None = None
    checked: bool = field(default=True, compare=False)

    @property
    def trees(self) -> Iterator[Tree]:
        """The root tree, then those of the segments."""
        yield self.tree
        for segment in self.segments:
            yield segment.tree

    @property
    def views(self) -> Iterator[SstView]:
        """Every view of every tree."""
        for tree in self.trees:
            yield from tree.views

    @property
    def lists_of_views(self) -> Iterator[tuple[SstView, ...]]:
        """L0 and the runs of every tree."""
        for tree in self.trees:
            yield tree.l0
            for run in tree.runs:
                yield run.views

    @property
    def newest_l0(self) -> Ulid | None:
        """The id that a new L0 SST must not be older than; see `Tree.newest_l0`."""
        return trees.newest_l0(self.trees)

    @property
    def run_ids(self) -> Iterator[RunId]:
        """The ids of all runs; each belongs to one run of one tree."""
        return (run.id for tree in self.trees for run in tree.runs)

    def sst(self, view: SstView) -> SsTable:
        """The SST behind a view of this manifest."""
        return self.ssts[view.sst_id]

    def tree_of(self, prefix: bytes) -> Tree | None:
        """The tree of the segment with that prefix; the root tree for b"" unless a segment has it."""
        for segment in self.segments:
            if segment.prefix == prefix:
                return segment.tree
        return self.tree if not prefix else None

    def path_of_owner(self, sst_id: Ulid) -> str | None:
        """The path of the lender of a borrowed SST; None for an SST of this database."""
        return next((db.path for db in self.external_dbs if sst_id in db.sst_ids), None)

    def checkpoint(self, checkpoint_id: UUID) -> Checkpoint | None:
        """The checkpoint with that id, if the manifest still has it."""
        return next((entry for entry in self.checkpoints if entry.id == checkpoint_id), None)


def new_manifest(*, segment_extractor_name: str | None = None) -> Manifest:
    """The first manifest of a new database."""
    return Manifest(segment_extractor_name=segment_extractor_name)


def replace_trees(
    manifest: Manifest,
    *,
    tree: Tree | None = None,
    segments: Iterable[Segment] | None = None,
    added: Collection[SsTable] = (),
) -> Manifest:
    """The manifest with other trees: `added` SSTs join it, those without a view leave it.

    Borrowed SSTs without a view leave the lists of their lenders, too; a lender whose list became empty stays until
    garbage collection has released its checkpoint.
    """
    edited = replace(
        manifest,
        tree=manifest.tree if tree is None else tree,
        segments=manifest.segments if segments is None else tuple(sorted(segments, key=lambda s: s.prefix)),
    )
    # Most edits leave most runs as they are, and a run may have a hundred thousand views.
    before, after = ({id(views): views for views in held.lists_of_views} for held in (manifest, edited))
    entered = {view.sst_id for key, views in after.items() if key not in before for view in views}
    ssts = dict(manifest.ssts)
    last = next(reversed(ssts), 0)
    ssts.update((sst.id, sst) for sst in added)
    unknown = [sst_id for sst_id in entered if sst_id not in ssts]
    if unknown:
        raise InternalError(f"views refer to SSTs that are not described: {sorted(unknown)}")
    left = {view.sst_id for key, views in before.items() if key not in after for view in views}
    left = (left | {sst.id for sst in added}) - entered
    if left:
        left -= {view.sst_id for key, views in after.items() if key in before for view in views}
    for sst_id in left:
        del ssts[sst_id]
    if any(sst.id < last for sst in added):
        ssts = dict(sorted(ssts.items()))
    return replace(
        edited, ssts=ssts, external_dbs=tuple(_with_ssts_of(db, ssts) for db in manifest.external_dbs)
    )


def _with_ssts_of(db: ExternalDb, ssts: Mapping[Ulid, SsTable]) -> ExternalDb:
    kept = tuple(sst_id for sst_id in db.sst_ids if sst_id in ssts)
    return db if len(kept) == len(db.sst_ids) else replace(db, sst_ids=kept)


def edit_tree(
    manifest: Manifest, prefix: bytes, edit: Callable[[Tree], Tree], *, added: Collection[SsTable] = ()
) -> Manifest:
    """The manifest with the tree of one segment (b"": the root tree) edited; a new segment starts empty."""
    return edit_trees(manifest, [(prefix, edit)], added=added)


def edit_trees(
    manifest: Manifest,
    edits: Iterable[tuple[bytes, Callable[[Tree], Tree]]],
    *,
    added: Collection[SsTable] = (),
) -> Manifest:
    """The manifest with the trees of several segments edited, in order; see `edit_tree`."""
    tree = manifest.tree
    by_prefix = {segment.prefix: segment for segment in manifest.segments}
    for prefix, edit in edits:
        if prefix or prefix in by_prefix:
            before = by_prefix.get(prefix, Segment(prefix))
            by_prefix[prefix] = replace(before, tree=edit(before.tree))
        else:
            tree = edit(tree)
    return replace_trees(manifest, tree=tree, segments=by_prefix.values(), added=added)


@dataclass(frozen=True, slots=True)
class Flush:
    """The result of a memtable flush: new L0 SSTs by segment prefix (b"" without segments), and where it ended."""

    ssts: tuple[tuple[bytes, SsTable], ...]
    replay_after_wal_id: WalId
    wal_id_last_seen: WalId
    last_clock_tick: int
    last_seq: Seq
    snapshot_min_seq: Seq
    points: SequenceTracker = field(default_factory=SequenceTracker)


def apply_flush(manifest: Manifest, flush: Flush) -> Manifest:
    """The manifest after a flush. Applied a second time it changes nothing."""
    if flush.last_seq <= manifest.last_l0_seq:
        return manifest
    return replace(
        edit_trees(
            manifest,
            [(prefix, partial(trees.apply_flush, view=SstView.whole(sst.id))) for prefix, sst in flush.ssts],
            added=[sst for _, sst in flush.ssts],
        ),
        replay_after_wal_id=max(manifest.replay_after_wal_id, flush.replay_after_wal_id),
        wal_id_last_seen=max(manifest.wal_id_last_seen, flush.wal_id_last_seen),
        last_l0_clock_tick=max(manifest.last_l0_clock_tick, flush.last_clock_tick),
        last_l0_seq=flush.last_seq,
        # A range delete may have raised it above a snapshot that is still open.
        recent_snapshot_min_seq=max(manifest.recent_snapshot_min_seq, flush.snapshot_min_seq),
        sequence_tracker=manifest.sequence_tracker.extend(flush.points),
    )


def apply_compaction(
    manifest: Manifest,
    *,
    segment: bytes,
    l0: Collection[Ulid],
    runs: Collection[RunId],
    destination: RunId | None,
    output: Sequence[SsTable] = (),
) -> Manifest:
    """The manifest after a compaction job; `output` are the SSTs of the new run in key order."""
    views = tuple(SstView.whole(sst.id) for sst in output)
    return edit_tree(
        manifest,
        segment,
        lambda tree: trees.apply_compaction(tree, l0=l0, runs=runs, destination=destination, output=views),
        added=output,
    )


def renew_repeated_view_ids(manifest: Manifest) -> Manifest:
    """The manifest with an id of its own for every view; itself when that is so already.

    SlateDB's union keeps the ids of its sources, so that two parts of one SST share one. A compaction of either would
    remove both, so a process that claims a role in such a database first gives them different ids. The first keeps its
    id; the others get the next free id, which has the same time.
    """
    ids = [view.id for view in manifest.views]
    used, seen = set(ids), set[Ulid]()
    if len(used) == len(ids):
        return manifest

    def renew(view: SstView) -> SstView:
        view_id = view.id
        if view_id in seen:
            while view_id in used:
                view_id = Ulid(view_id + 1)
            used.add(view_id)
        seen.add(view_id)
        return replace(view, id=view_id)

    def renewed(tree: Tree) -> Tree:
        l0 = tuple(renew(view) for view in tree.l0)
        runs = tuple(replace(run, views=tuple(renew(view) for view in run.views)) for run in tree.runs)
        return replace(tree, l0=l0, runs=runs)

    return replace_trees(
        manifest,
        tree=renewed(manifest.tree),
        segments=[replace(segment, tree=renewed(segment.tree)) for segment in manifest.segments],
    )


def drop_empty_segments(manifest: Manifest) -> Manifest:
    """The manifest without segments that hold no data; only the writer may do this."""
    kept = tuple(segment for segment in manifest.segments if not segment.tree.empty)
    return manifest if len(kept) == len(manifest.segments) else replace(manifest, segments=kept)


def add_checkpoint(manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """The manifest with a checkpoint; one that it already has is replaced in place."""
    if manifest.checkpoint(checkpoint.id) is None:
        return replace(manifest, checkpoints=(*manifest.checkpoints, checkpoint))
    kept = tuple(checkpoint if entry.id == checkpoint.id else entry for entry in manifest.checkpoints)
    return replace(manifest, checkpoints=kept)


def remove_checkpoint(manifest: Manifest, checkpoint_id: UUID) -> Manifest:
    """The manifest without that checkpoint; itself when it has none of that id."""
    kept = tuple(entry for entry in manifest.checkpoints if entry.id != checkpoint_id)
    return manifest if len(kept) == len(manifest.checkpoints) else replace(manifest, checkpoints=kept)


def remove_expired_checkpoints(manifest: Manifest, now_s: int) -> Manifest:
    """The manifest without the checkpoints that expired at or before `now_s`."""
    kept = tuple(
        entry for entry in manifest.checkpoints if entry.expires_s is None or entry.expires_s > now_s
    )
    return manifest if len(kept) == len(manifest.checkpoints) else replace(manifest, checkpoints=kept)
