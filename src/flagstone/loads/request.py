"""How a bulk load reaches the writer that has the database open: three small things that both sides can read.

The notice   `flagstone/writer`, written by a writer when it opens the database and again when it closes it. It says
             whether a writer adopts loads. After a crash it is wrong, and the load finds that out by waiting.
The record   A checkpoint, from before the first task of the load until the load is over. Its name holds the state of
             the load. While it exists, garbage collection deletes no SST that could belong to the load.
The request  `flagstone/loads/<id of the record>`, the SSTs of the load, written before the record becomes `ready`.

The record is part of the manifest, so every step is one manifest: the load goes from `loading` to `ready`, then the
writer sets `done`, in the manifest that adds the SSTs, or `refused`. A load gives up by removing its record, and no
writer adopts a load without a record. After a crash the record stays until it expires.

A load that claims the database needs no request; its record, `done`, comes with the manifest that adds its SSTs.
Consumers of changes find loads by `done` records (`flagstone.loads.edit`).
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Final
from uuid import UUID

from flagstone.errors import CorruptData
from flagstone.loads.edit import ExpectedRow, Load
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.annotations import HeldLoad, LoadState, encode_load, held_loads
from flagstone.metadata.integrity import seal_metadata, unseal_metadata
from flagstone.metadata.manifest import SEQ_GAP, Manifest, add_checkpoint
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import RunId, Seq, Ulid

ROWS_CHANGED: Final = "rows on which the load relies have changed"
"""How the reason for refusing a load begins, if a row was not as the load expects."""

_NOTICE: Final = "writer"
_REQUESTS: Final = "loads"


def find_load_record(manifest: Manifest, load_id: UUID) -> HeldLoad | None:
    """The record of that load; None when it was removed or has expired."""
    return next((held for held in held_loads(manifest) if held.checkpoint.id == load_id), None)


def oldest_open_ms(manifest: Manifest) -> int | None:
    """The time in the SST ids of the oldest open load: younger SSTs may belong to it."""
    return min((held.record.id_ms for held in held_loads(manifest) if held.record.open), default=None)


def plan_seq(manifest: Manifest) -> Seq:
    """The sequence number of a new load: above those the writer uses meanwhile, and above every other load."""
    others = (held.record.seq for held in held_loads(manifest) if held.record.open)
    return Seq(max(manifest.last_l0_seq, *others, 0) + SEQ_GAP)


def move_load(manifest: Manifest, held: HeldLoad, state: LoadState, *, reason: str = "") -> Manifest:
    """The manifest with the load in that state."""
    name = encode_load(replace(held.record, state=state, reason=reason))
    return add_checkpoint(manifest, replace(held.checkpoint, name=name))


# -- the request ----------------------------------------------------------------------------------------------


def save_request(store: ObjectStore, paths: DbPaths, load_id: UUID, load: Load) -> None:
    """Write the load request for the writer. A request without a record has no effect."""
    # The SSTs are described by a manifest that has nothing else.
    views = tuple(SstView.whole(sst.id) for sst in load.ssts)
    described = Manifest(
        tree=Tree(runs=(SortedRun(RunId(0), views),) if views else ()),
        ssts={sst.id: sst for sst in load.ssts},
    )
    fields = {
        "seq": load.seq,
        "created_ms": load.created_ms,
        "marker": str(int(load.marker)),
        "replaces_all": load.replaces_all,
        "expected": [[row.key.hex(), row.digest] for row in load.expected],
        "tables": base64.b64encode(encode_manifest(described)).decode(),
    }
    path = _request_path(paths, load_id)
    store.put(path, seal_metadata(json.dumps(fields).encode(), path))


def load_request(store: ObjectStore, paths: DbPaths, load_id: UUID) -> Load:
    """The load of a load request.

    Raises:
        ObjectMissing: there is no request.
        CorruptData: the object is not a load request.

    """
    path = _request_path(paths, load_id)
    data, _ = unseal_metadata(store.get(path).data, path)
    try:
        fields = json.loads(data)
        described = decode_manifest(base64.b64decode(fields["tables"]), strict=True)
        return Load(
            tuple(described.sst(view) for view in described.views),
            Seq(int(fields["seq"])),
            int(fields["created_ms"]),
            Ulid(int(fields["marker"])),
            replaces_all=bool(fields["replaces_all"]),
            expected=tuple(
                ExpectedRow(bytes.fromhex(key), digest) for key, digest in fields.get("expected", ())
            ),
        )
    except (KeyError, TypeError, ValueError, CorruptData) as error:
        raise CorruptData(f"not a load request: {error}", object=path) from None


def delete_stale_requests(store: ObjectStore, paths: DbPaths, manifest: Manifest) -> None:
    """Delete the requests of loads that are over, or whose driver crashed before the record was `ready`."""
    alive = {_request_path(paths, held.checkpoint.id) for held in held_loads(manifest) if held.record.open}
    found = [meta.path for meta in store.list(paths.own(_REQUESTS))]
    store.delete_many([path for path in found if path not in alive])


def _request_path(paths: DbPaths, load_id: UUID) -> str:
    return paths.own(f"{_REQUESTS}/{load_id}")


# -- the notice -----------------------------------------------------------------------------------------------


def announce_writer(store: ObjectStore, paths: DbPaths, epoch: int | None) -> None:
    """Write the notice that the writer of that epoch is open and adopts loads; None: that it has closed."""
    store.put(paths.own(_NOTICE), json.dumps({"epoch": epoch}).encode())


def is_writer_announced(store: ObjectStore, paths: DbPaths, manifest: Manifest) -> bool:
    """Whether the current owner of the database adopts loads and has not closed the database since."""
    try:
        notice = json.loads(store.get(paths.own(_NOTICE)).data)
        return bool(notice["epoch"] == manifest.writer_epoch)
    except (ObjectMissing, KeyError, TypeError, ValueError):
        return False
