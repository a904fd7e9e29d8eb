"""Manifest <-> bytes: u16 BE version, then one FlatBuffers buffer. Versions 1 and 2 are read, 2 is written.

Children are written in the order of SlateDB's writer, so that equal manifests are equal files. See `format/flat.py` for
the encoding itself, and `integrity.py` for the checksum after it.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, Final

from flagstone.errors import CorruptData
from flagstone.format import flat
from flagstone.format.sst_info import SST_INFO
from flagstone.lsm.sequence import SequenceTracker, decode_tracker, encode_tracker
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.integrity import unseal_metadata
from flagstone.metadata.invariants import check_stored_manifest
from flagstone.metadata.manifest import Checkpoint, ExternalDb, Manifest, Segment, SsTable
from flagstone.types import ManifestId, Ulid

VERSION: Final = 2
ENVELOPE_BYTES: Final = 2
_LOW_64: Final = 2**64 - 1
_BOUND_KINDS: Final = {kind.value: kind for kind in BoundKind}


def encode_manifest(manifest: Manifest) -> bytes:
    """The stored bytes of the manifest, version 2."""
    return flat.encode(_MANIFEST, manifest, before=VERSION.to_bytes(ENVELOPE_BYTES, "big"))


def decode_manifest(data: bytes | memoryview, *, strict: bool = False) -> Manifest:
    """The manifest in `data`; anything else raises CorruptData with the offset inside `data`.

    `strict` is for manifests without a checksum: no byte may be left over, and impossible content is refused.
    """
    version = envelope_version(data, "manifest")
    shape = {1: _MANIFEST_V1, 2: _MANIFEST}.get(version)
    if shape is None:
        raise CorruptData(f"unsupported manifest format version {version}", offset=0)
    try:
        manifest = flat.decode(shape, data, start=ENVELOPE_BYTES, strict=strict)
    except CorruptData as error:
        raise error.within(None, ENVELOPE_BYTES) from None
    if strict:
        check_stored_manifest(manifest)
    return manifest


def load_manifest(stored: bytes, path: str) -> Manifest:
    """The manifest in the bytes at `path`. Raises CorruptData naming object and offset."""
    data, checked = unseal_metadata(stored, path)
    try:
        manifest = decode_manifest(data, strict=not checked)
    except CorruptData as error:
        raise error.within(path) from None
    return manifest if checked else replace(manifest, checked=False)


def envelope_version(data: bytes | memoryview, what: str) -> int:
    """The version number of a metadata object, whose buffer begins at `ENVELOPE_BYTES`."""
    if len(data) < ENVELOPE_BYTES:
        raise CorruptData(f"a {what} of {len(data)} bytes is cut off", offset=0)
    return int.from_bytes(data[:ENVELOPE_BYTES], "big")


def _make_bound(values: list[Any]) -> Bound:
    key, kind = values
    known = _BOUND_KINDS.get(kind)
    if known is None:
        raise CorruptData(f"unknown kind {kind} of a range bound")
    return Bound(known, key)


def _make_visible_range(values: list[Any]) -> BytesRange:
    start, end = values
    if start.kind is BoundKind.EXCLUDED:
        raise CorruptData("the visible range of a view must not exclude its start")
    return BytesRange(start, end)


def _make_checkpoint(values: list[Any]) -> Checkpoint:
    checkpoint_id, manifest_id, expires_s, created_s, _, _, name = values
    return Checkpoint(checkpoint_id, ManifestId(manifest_id), created_s, expires_s or None, name)


def _make_segment(values: list[Any]) -> Segment:
    prefix, last_compacted, l0, runs = values
    return Segment(prefix, Tree(l0, runs, last_compacted))


def _tracker(data: bytes | None) -> SequenceTracker:
    return SequenceTracker() if data is None else decode_tracker(data)


def _make_manifest(values: list[Any]) -> Manifest:
    _, external_dbs, initialized, writer_epoch, compactor_epoch, replay_after, wal_last_seen, *rest = values
    last_compacted, ssts, l0, runs, tick, checkpoints, last_seq, snapshot_seq, tracker, *rest = rest
    segments, extractor = rest
    described = {sst.id: sst for sst in ssts}
    if len(described) < len(ssts):
        raise CorruptData("the manifest describes an SST twice")
    manifest = Manifest(
        initialized=initialized,
        writer_epoch=writer_epoch,
        compactor_epoch=compactor_epoch,
        replay_after_wal_id=replay_after,
        wal_id_last_seen=wal_last_seen,
        ssts=described,
        tree=Tree(l0, runs, last_compacted),
        segments=tuple(sorted(segments or (), key=lambda segment: segment.prefix)),
        segment_extractor_name=extractor,
        last_l0_clock_tick=tick,
        last_l0_seq=last_seq,
        recent_snapshot_min_seq=snapshot_seq,
        sequence_tracker=_tracker(tracker),
        checkpoints=checkpoints,
        external_dbs=external_dbs or (),
    )
    for views in manifest.lists_of_views:
        unknown = [view.sst_id for view in views if view.sst_id not in described]
        if unknown:
            raise CorruptData(f"a view refers to SST {unknown[0]:#x}, which the manifest does not describe")
    return manifest


def _take_manifest(manifest: Manifest) -> tuple[Any, ...]:
    return (
        0,  # the id is in the object's name
        manifest.external_dbs or None,
        manifest.initialized,
        manifest.writer_epoch,
        manifest.compactor_epoch,
        manifest.replay_after_wal_id,
        manifest.wal_id_last_seen,
        manifest.tree.last_compacted_l0,
        _sorted_ssts(manifest),
        manifest.tree.l0,
        manifest.tree.runs,
        manifest.last_l0_clock_tick,
        manifest.checkpoints,
        manifest.last_l0_seq,
        manifest.recent_snapshot_min_seq,
        encode_tracker(manifest.sequence_tracker),
        manifest.segments,
        manifest.segment_extractor_name,
    )


def _sorted_ssts(manifest: Manifest) -> list[SsTable]:
    ids = list(manifest.ssts)
    ordered = sorted(ids)
    return [*manifest.ssts.values()] if ids == ordered else [manifest.ssts[sst_id] for sst_id in ordered]


def _make_manifest_v1(values: list[Any]) -> Manifest:
    _, external_dbs, initialized, writer_epoch, compactor_epoch, replay_after, wal_last_seen, *rest = values
    last_compacted, l0, runs, tick, checkpoints, last_seq, wal_uri, snapshot_seq, tracker = rest
    # Version 1 repeats an SST's description wherever it is used and has no view ids: the id of the SST is used.
    placed = [*l0, *(sst for _, ssts in runs for sst in ssts)]
    return Manifest(
        initialized=initialized,
        writer_epoch=writer_epoch,
        compactor_epoch=compactor_epoch,
        replay_after_wal_id=replay_after,
        wal_id_last_seen=wal_last_seen,
        ssts={sst.id: sst for sst, _ in sorted(placed, key=lambda item: item[0].id)},
        tree=Tree(
            _views_of(l0),
            tuple(SortedRun(run_id, _views_of(ssts)) for run_id, ssts in runs),
            last_compacted,
        ),
        last_l0_clock_tick=tick,
        last_l0_seq=last_seq,
        recent_snapshot_min_seq=snapshot_seq,
        sequence_tracker=_tracker(tracker),
        checkpoints=checkpoints,
        external_dbs=external_dbs or (),
        wal_object_store_uri=wal_uri,
    )


def _make_placed_table(values: list[Any]) -> tuple[SsTable, BytesRange | None]:
    sst_id, info, visible, version = values
    return SsTable(sst_id, info, version), visible


def _views_of(placed: tuple[tuple[SsTable, BytesRange | None], ...]) -> tuple[SstView, ...]:
    return tuple(SstView(sst.id, sst.id, visible) for sst, visible in placed)


def _never_written(value: Any) -> tuple[Any, ...]:
    raise NotImplementedError(f"version 1 manifests are read only: {value!r}")


ULID: Final = flat.Shape[Ulid](
    "Ulid",
    flat.U64,
    flat.U64,
    wide=True,
)
_UUID: Final = flat.Shape[uuid.UUID](
    "Uuid",
    flat.U64,
    flat.U64,
    make=lambda halves: uuid.UUID(int=halves[0] << 64 | halves[1]),
    take=lambda value: (value.int >> 64, value.int & _LOW_64),
)
_BOUND: Final = flat.Shape[Bound](
    "BytesBound", flat.Bytes(), flat.I8, make=_make_bound, take=lambda bound: (bound.key, bound.kind)
)
BYTES_RANGE: Final = flat.Shape[BytesRange](
    "BytesRange",
    flat.Child(_BOUND, required=True),
    flat.Child(_BOUND, required=True),
    record=BytesRange,
)
_VISIBLE_RANGE: Final = flat.Shape[BytesRange](
    "BytesRange",
    flat.Child(_BOUND, required=True),
    flat.Child(_BOUND, required=True),
    make=_make_visible_range,
    take=lambda held: (held.start, held.end),
)
_FORMAT_VERSION: Final = flat.Field("H", absent=1, unwritten=None)
OUTPUT_SST: Final = flat.Shape[SsTable](
    "CompactedSsTable",
    flat.Child(ULID, required=True),
    flat.Child(SST_INFO, required=True),
    flat.Child(BYTES_RANGE),
    _FORMAT_VERSION,
    record=SsTable,
    members=("id", "info", None, "format_version"),
)
_PLACED_SST: Final = flat.Shape[tuple[SsTable, BytesRange | None]](
    "CompactedSsTable",
    flat.Child(ULID, required=True),
    flat.Child(SST_INFO, required=True),
    flat.Child(_VISIBLE_RANGE),
    _FORMAT_VERSION,
    make=_make_placed_table,
    take=_never_written,
)
_TABLE: Final = flat.Shape[SsTable](
    "CompactedSsTableV2",
    flat.Child(ULID, required=True),
    flat.Child(SST_INFO, required=True),
    _FORMAT_VERSION,
    record=SsTable,
)
_VIEW: Final = flat.Shape[SstView](
    "CompactedSsTableView",
    flat.Child(ULID, required=True),
    flat.Child(ULID, required=True),
    flat.Child(_VISIBLE_RANGE),
    record=SstView,
    order=(1, 2, 0),
)
_RUN: Final = flat.Shape[SortedRun](
    "SortedRunV2",
    flat.U32,
    flat.Children(_VIEW, required=True),
    record=SortedRun,
)
_RUN_V1: Final = flat.Shape[tuple[Any, ...]](
    "SortedRun", flat.U32, flat.Children(_PLACED_SST, required=True), make=tuple, take=_never_written
)
_SEGMENT: Final = flat.Shape[Segment](
    "Segment",
    flat.Bytes(required=True),
    flat.Child(ULID),
    flat.Children(_VIEW, required=True),
    flat.Children(_RUN, required=True),
    make=_make_segment,
    take=lambda held: (held.prefix, held.tree.last_compacted_l0, held.tree.l0, held.tree.runs),
    order=(0, 2, 1, 3),
)
_CHECKPOINT: Final = flat.Shape[Checkpoint](
    "Checkpoint",
    flat.Child(_UUID, required=True),
    flat.U64,
    flat.U32,
    flat.U32,
    flat.U8,  # kind of the metadata union, which no release fills in
    flat.U32,  # its offset, which is not followed
    flat.Text(),
    make=_make_checkpoint,
    take=lambda held: (held.id, held.manifest_id, held.expires_s or 0, held.created_s, 0, 0, held.name),
)
_EXTERNAL_DB: Final = flat.Shape[ExternalDb](
    "ExternalDb",
    flat.Text(required=True),
    flat.Child(_UUID, required=True),
    flat.Child(_UUID),
    flat.Children(ULID, required=True),
    make=lambda values: ExternalDb(*values),
    take=lambda db: (db.path, db.source_checkpoint_id, db.final_checkpoint_id, db.sst_ids),
)
_MANIFEST: Final = flat.Shape[Manifest](
    "ManifestV2",
    flat.U64,
    flat.Children(_EXTERNAL_DB),
    flat.BOOL,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.Child(ULID),
    flat.Children(_TABLE, required=True),
    flat.Children(_VIEW, required=True),
    flat.Children(_RUN, required=True),
    flat.I64,
    flat.Children(_CHECKPOINT, required=True),
    flat.U64,
    flat.U64,
    flat.Bytes(),
    flat.Children(_SEGMENT),
    flat.Text(),
    make=_make_manifest,
    take=_take_manifest,
    order=(8, 9, 7, 10, 16, 17, 12, 1, 15),
)
_MANIFEST_V1: Final = flat.Shape[Manifest](
    "ManifestV1",
    flat.U64,
    flat.Children(_EXTERNAL_DB),
    flat.BOOL,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.Child(ULID),
    flat.Children(_PLACED_SST, required=True),
    flat.Children(_RUN_V1, required=True),
    flat.I64,
    flat.Children(_CHECKPOINT, required=True),
    flat.U64,
    flat.Text(),
    flat.U64,
    flat.Bytes(),
    make=_make_manifest_v1,
    take=_never_written,
)
