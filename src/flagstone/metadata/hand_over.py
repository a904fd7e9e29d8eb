"""How a bulk load is handed to the writer that has the database open: three small things that both sides can see.

The notice   `flagstone/writer`, written by a writer when it opens the database and again when it closes it. It says
             whether somebody looks for loads. After a crash it is wrong, and the load finds out by waiting.
The mark     A checkpoint, from before the first task of the load until it is over. Its name says how far the load is.
             While it is there, garbage collection takes no table that could be the load's.
The request  `flagstone/loads/<id of the mark>`, the tables of the load, written before the mark says `ready`.

The mark is part of the manifest, so every step is one version of it: from `loading` to `ready` by the load, then to
`done` by the writer, in the very version that has the tables, or to `refused`. A load gives up by removing its mark,
and nobody takes in one without a mark. Whoever crashes leaves a mark that expires.

A load that claims the database needs no hand-over; it gets its mark, `done`, in the version that has its tables.
From `done` marks consumers of changes learn what never was in the log (`flagstone.wal.load_marks`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args
from urllib.parse import parse_qs, urlencode
from uuid import UUID

from flagstone.errors import CorruptData
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.integrity import seal_metadata, unseal_metadata
from flagstone.metadata.loads import SEQ_GAP, Load
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import RunId, Seq, Ulid, WalId

State = Literal["loading", "ready", "done", "refused"]
_STATES: Final[tuple[State, ...]] = get_args(State)
_PREFIX: Final = "flagstone.load/"
_NOTICE: Final = "writer"
_REQUESTS: Final = "loads"


class LoadPlace(NamedTuple):
    """Behind what a load comes: the last sequence number and the last file of the log before it."""

    seq: Seq
    wal_id: WalId


@dataclass(frozen=True, slots=True)
class LoadMark:
    """A load under way: its sequence number, the time in the ids of its tables, and how far it is.

    `reason` says why it was refused. Of several loads of one `owner` only the last counts; "" is nobody's.

    Of a load that is done, `place` is where it stands among all other changes. Its checkpoint then pins the version
    that brought it, in which its tables are the newest run; for one that `replaces` what was there, the version before.
    """

    state: State
    seq: Seq
    id_ms: int
    reason: str = ""
    owner: str = ""
    place: LoadPlace | None = None
    replaces: bool = False

    @property
    def open(self) -> bool:
        """Whether it may still become part of the database."""
        return self.state in ("loading", "ready")


class HeldMark(NamedTuple):
    """A mark as the manifest has it."""

    checkpoint: Checkpoint
    mark: LoadMark


def encode_mark(mark: LoadMark) -> str:
    """The name of the checkpoint that is the mark."""
    said: dict[str, int | str] = {"seq": mark.seq, "id_ms": mark.id_ms}
    said |= {"reason": mark.reason, "owner": mark.owner}
    if mark.place is not None:
        said |= {"after": mark.place.seq, "after_wal": mark.place.wal_id, "replaces": int(mark.replaces)}
    return f"{_PREFIX}{mark.state}?{urlencode(said)}"


def held_marks(manifest: Manifest) -> Iterator[HeldMark]:
    """The marks of all loads. A name that only looks like one is passed over."""
    for checkpoint in manifest.checkpoints:
        mark = _decode_mark(checkpoint.name or "")
        if mark is not None:
            yield HeldMark(checkpoint, mark)


def _decode_mark(name: str) -> LoadMark | None:
    if not name.startswith(_PREFIX):
        return None
    said_state, _, stated = name.removeprefix(_PREFIX).partition("?")
    state = next((known for known in _STATES if known == said_state), None)
    said = {name: values[0] for name, values in parse_qs(stated, keep_blank_values=True).items()}
    try:
        place = LoadPlace(Seq(int(said["after"])), WalId(int(said["after_wal"]))) if "after" in said else None
        return state and LoadMark(
            state,
            Seq(int(said["seq"])),
            int(said["id_ms"]),
            said["reason"],
            said["owner"],
            place,
            replaces=said.get("replaces", "0") != "0",
        )
    except (KeyError, ValueError):
        return None


def find_mark(manifest: Manifest, mark_id: UUID) -> HeldMark | None:
    """The mark of that load, unless it was given up or has expired."""
    return next((held for held in held_marks(manifest) if held.checkpoint.id == mark_id), None)


def oldest_open_ms(manifest: Manifest) -> int | None:
    """The time in the ids of the oldest load under way: younger tables may be its."""
    return min((held.mark.id_ms for held in held_marks(manifest) if held.mark.open), default=None)


def plan_seq(manifest: Manifest) -> Seq:
    """The number for a new load: above all that the writer gives out meanwhile, and above every other load."""
    others = (held.mark.seq for held in held_marks(manifest) if held.mark.open)
    return Seq(max(manifest.last_l0_seq, *others, 0) + SEQ_GAP)


def move_mark(
    manifest: Manifest, held: HeldMark, state: State, *, reason: str = "", **pinned: Any
) -> Manifest:
    """The manifest whose mark says `state`; `pinned` are other fields of its checkpoint."""
    name = encode_mark(replace(held.mark, state=state, reason=reason))
    return add_checkpoint(manifest, replace(held.checkpoint, name=name, **pinned))


# -- the request ----------------------------------------------------------------------------------------------


def save_request(store: ObjectStore, paths: DbPaths, mark_id: UUID, load: Load) -> None:
    """Leave the load for the writer. A request without a mark means nothing."""
    # Tables are described in a manifest's own words: one that has nothing but them.
    views = tuple(SstView.whole(table.id) for table in load.tables)
    tables = Manifest(
        tree=Tree(runs=(SortedRun(RunId(0), views),) if views else ()),
        ssts={table.id: table for table in load.tables},
    )
    said = {
        "seq": load.seq,
        "created_ms": load.created_ms,
        "marker": str(int(load.marker)),
        "replaces_all": load.replaces_all,
        "tables": base64.b64encode(encode_manifest(tables)).decode(),
    }
    path = _request_path(paths, mark_id)
    store.put(path, seal_metadata(json.dumps(said).encode(), path))


def load_request(store: ObjectStore, paths: DbPaths, mark_id: UUID) -> Load:
    """The load that was left for the writer.

    Raises:
        ObjectMissing: there is none.
        CorruptData: it is no request.

    """
    path = _request_path(paths, mark_id)
    data, _ = unseal_metadata(store.get(path).data, path)
    try:
        said = json.loads(data)
        described = decode_manifest(base64.b64decode(said["tables"]), strict=True)
        return Load(
            tuple(described.table(view) for view in described.views),
            Seq(int(said["seq"])),
            int(said["created_ms"]),
            Ulid(int(said["marker"])),
            replaces_all=bool(said["replaces_all"]),
        )
    except (KeyError, TypeError, ValueError, CorruptData) as error:
        raise CorruptData(f"not a request for a load: {error}", object=path) from None


def delete_stale_requests(store: ObjectStore, paths: DbPaths, manifest: Manifest) -> None:
    """Remove the requests of loads that are over, or whose maker crashed before the mark knew of it."""
    alive = {_request_path(paths, held.checkpoint.id) for held in held_marks(manifest) if held.mark.open}
    found = [meta.path for meta in store.list(paths.own(_REQUESTS))]
    store.delete_many([path for path in found if path not in alive])


def _request_path(paths: DbPaths, mark_id: UUID) -> str:
    return paths.own(f"{_REQUESTS}/{mark_id}")


# -- the notice -----------------------------------------------------------------------------------------------


def announce_writer(store: ObjectStore, paths: DbPaths, epoch: int | None) -> None:
    """Say that the writer of that epoch has the database open, and looks for loads; None: that it closed it."""
    store.put(paths.own(_NOTICE), json.dumps({"epoch": epoch}).encode())


def is_writer_announced(store: ObjectStore, paths: DbPaths, manifest: Manifest) -> bool:
    """Whether the present owner of the database said that it looks for loads, and has not closed it since."""
    try:
        said = json.loads(store.get(paths.own(_NOTICE)).data)
        return bool(said["epoch"] == manifest.writer_epoch)
    except (ObjectMissing, KeyError, TypeError, ValueError):
        return False
