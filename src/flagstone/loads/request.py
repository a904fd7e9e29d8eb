"""How a bulk load reaches the writer that adopts it: two things that both sides can read.

The record   A checkpoint, from before the first task of the load until the load is over. Its name holds the state of
             the load. While it exists, garbage collection deletes no SST of the load.
The request  `flagstone/loads/<id of the record>`, the SSTs of the load, written before the record becomes `ready`.

The record is part of the manifest, so every step is one manifest: the load goes from `loading` to `ready`, then the
writer sets `done`, in the manifest that adds the SSTs, or `refused`. A load gives up by removing its record, and no
writer adopts a load without a record. After a crash the record stays until it expires (`flagstone.loads.lifetime`).

If no writer has the database open, the driver of the load opens it, adopts its own load, and closes it again.

The sequence number of a load is in its rows, so it is chosen before the first task runs, far ahead. If the database
has passed that number when the load is ready, the writer refuses the load as `OVERTAKEN`. The driver then rewrites the
SSTs under another number and offers the load again.

Consumers of changes find loads by `done` records (`flagstone.loads.edit`).
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from flagstone.errors import CorruptData
from flagstone.loads.edit import Load
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.annotations import HeldLoad, LoadState, encode_load, held_loads
from flagstone.metadata.integrity import seal_metadata, unseal_metadata
from flagstone.metadata.manifest import SEQ_GAP, Manifest, Segment, add_checkpoint
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import RunId, Seq, Ulid

_REQUESTS: Final = "loads"

OVERTAKEN: Final = "overtaken"
"""`LoadRecord.reason` of a load whose sequence number the database had passed."""

CONDITION_FAILED: Final = "condition"
"""`LoadRecord.reason` of a load whose condition did not hold (`Load.expects`)."""

_STREAM_GAP: Final = 1 << 26
_FIRST_DETOUR: Final = 1 << 40
_DETOUR_STEP_BITS: Final = 4
_LONGEST_DETOUR: Final = 1 << 48


def oldest_open_ms(manifest: Manifest) -> int | None:
    """The time in the SST ids of the oldest open load without a tag: younger SSTs may belong to it."""
    return min(
        (held.record.id_ms for held in held_loads(manifest) if held.record.open and held.record.tag is None),
        default=None,
    )


def plan_seq(manifest: Manifest, *, stream: bool = False) -> Seq:
    """The sequence number of a new load: above those the writer uses meanwhile, and above most loads that began before.

    Loads that were renumbered are far ahead: the new load stays below them, so that they are not overtaken again. A
    micro-batch of a stream is short, and stays below every other load. But every new load is above those that are
    ready. The driver of one of them may have crashed, and a repeated load must be newer than what it repeats.
    """
    others = [held.record for held in held_loads(manifest) if held.record.open]
    passed = [
        each.seq
        for each in others
        if each.state == "ready" or (not each.renumbered and (not stream or each.owner))
    ]
    gap = _STREAM_GAP if stream else SEQ_GAP
    return _free(max(manifest.last_l0_seq, *passed, 0) + gap, {each.seq for each in others}, gap)


def plan_renumbering(manifest: Manifest, held: HeldLoad) -> Seq:
    """The next sequence number of a load that was overtaken: so far ahead that many loads can be adopted before it."""
    others = {
        each.record.seq
        for each in held_loads(manifest)
        if each.record.open and each.checkpoint.id != held.checkpoint.id
    }
    detour = min(_FIRST_DETOUR << (_DETOUR_STEP_BITS * held.record.renumbered), _LONGEST_DETOUR)
    return _free(max(manifest.last_l0_seq, held.record.seq) + detour, others, SEQ_GAP)


def _free(seq: int, taken: set[Seq], gap: int) -> Seq:
    while seq in taken:
        seq += gap
    return Seq(seq)


def move_load(manifest: Manifest, held: HeldLoad, state: LoadState, *, reason: str = "") -> Manifest:
    """The manifest with the load in that state."""
    name = encode_load(replace(held.record, state=state, reason=reason))
    return add_checkpoint(manifest, replace(held.checkpoint, name=name))


def apply_renumbering(manifest: Manifest, held: HeldLoad) -> Manifest:
    """The manifest in which an overtaken load is being built again, under another sequence number."""
    record = replace(
        held.record,
        state="loading",
        reason="",
        seq=plan_renumbering(manifest, held),
        renumbered=held.record.renumbered + 1,
    )
    return add_checkpoint(manifest, replace(held.checkpoint, name=encode_load(record)))


# -- the request ----------------------------------------------------------------------------------------------


def save_request(store: ObjectStore, paths: DbPaths, load_id: UUID, load: Load) -> None:
    """Write the load request for the writer. A request without a record has no effect."""
    # The SSTs are described by a manifest that has nothing else.
    by_prefix = load.by_segment()
    trees = {
        prefix: Tree(runs=(SortedRun(RunId(at), tuple(SstView.whole(sst.id) for sst in ssts)),))
        for at, (prefix, ssts) in enumerate(by_prefix.items())
    }
    described = Manifest(
        tree=trees.get(b"", Tree()),
        segments=tuple(Segment(prefix, trees[prefix]) for prefix in sorted(trees) if prefix),
        ssts={sst.id: sst for sst in load.ssts},
    )
    fields = {
        "seq": load.seq,
        "created_ms": load.created_ms,
        "marker": str(int(load.marker)),
        "replaces_all": load.replaces_all,
        "expects": [[_text(key), _text(value)] for key, value in load.expects],
        "only_if_new": load.only_if_new,
        "tables": _text(encode_manifest(described)),
    }
    path = request_path(paths, load_id)
    store.put(path, seal_metadata(json.dumps(fields).encode(), path))


def load_request(store: ObjectStore, paths: DbPaths, load_id: UUID) -> Load:
    """The load of a load request.

    Raises:
        ObjectMissing: there is no request.
        CorruptData: the object is not a load request.

    """
    path = request_path(paths, load_id)
    data = bytes(unseal_metadata(store.get(path).data, path)[0])
    try:
        fields = json.loads(data)
        described = decode_manifest(base64.b64decode(fields["tables"]), strict=True)
        ssts = [(b"", described.sst(view)) for view in described.tree.views]
        for segment in described.segments:
            ssts += [(segment.prefix, described.sst(view)) for view in segment.tree.views]
        return Load(
            tuple(sst for _, sst in ssts),
            Seq(int(fields["seq"])),
            int(fields["created_ms"]),
            Ulid(int(fields["marker"])),
            replaces_all=bool(fields["replaces_all"]),
            prefixes=tuple(prefix for prefix, _ in ssts) if described.segments else (),
            only_if_new=bool(fields.get("only_if_new", False)),
            expects=tuple((_bytes(key) or b"", _bytes(value)) for key, value in fields.get("expects", ())),
        )
    except (KeyError, TypeError, ValueError, CorruptData) as error:
        raise CorruptData(f"not a load request: {error}", object=path) from None


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def load_ssts(store: ObjectStore, paths: DbPaths, held: HeldLoad) -> list[tuple[Ulid, int]]:
    """The SSTs that an open load has on the store, with their sizes."""
    record = held.record
    if record.tag is None:
        return []
    found = []
    # The id before the first possible one. The ids of a load have one time, so the listing soon passes them.
    for meta in store.list(paths.sst_folder, after=paths.sst(Ulid(record.sst_id(0) - 1))):
        sst_id = paths.parse_sst(meta.path)
        if sst_id is not None and record.owns(sst_id):
            found.append((sst_id, meta.size))
        elif sst_id is not None and sst_id > record.sst_id(-1):
            break
    return found


def delete_load(store: ObjectStore, paths: DbPaths, held: HeldLoad) -> int:
    """Delete the request and the SSTs of a load whose record was removed or cancelled; returns how many SSTs.

    No manifest refers to them, and no later one can. A crash leaves the rest to garbage collection.
    """
    ssts = [paths.sst(sst_id) for sst_id, _ in load_ssts(store, paths, held)]
    store.delete_many([request_path(paths, held.checkpoint.id), *ssts])
    return len(ssts)


def delete_stale_requests(store: ObjectStore, paths: DbPaths, manifest: Manifest) -> None:
    """Delete the requests of loads that are over, or whose driver crashed before the record was `ready`."""
    alive = {request_path(paths, held.checkpoint.id) for held in held_loads(manifest) if held.record.open}
    found = [meta.path for meta in store.list(paths.own(_REQUESTS))]
    store.delete_many([path for path in found if path not in alive])


def request_path(paths: DbPaths, load_id: UUID) -> str:
    """Where the request of a load is."""
    return paths.own(f"{_REQUESTS}/{load_id}")
