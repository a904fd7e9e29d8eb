"""What Flagstone stores in fields of SlateDB's metadata: names of checkpoints, manifest 0, a worker id. Pure.

SlateDB has no fields for the state below. It keeps and copies checkpoint names and worker ids without reading them, so
they carry it:

    flagstone.log-pin/<consumer>?...   retention checkpoint: the position of a consumer of changes
    flagstone.load/<state>?...         load record: how far a bulk load is, later where it stands among the changes;
                                       also the record of a range delete
    flagstone.destroyed/<state>?...    destruction mark: the database was destroyed, its path may be vacant
    flagstone.clone/<path>             final checkpoint: the clone that borrows SSTs by it
    flagstone.parallel-wal/<limit>?... record of parallel WAL files: how many ids may be in doubt, and from where on
    coordinator <epoch> has left       worker of a finished job: the compaction coordinator left in order

The strings are stored: a change of one breaks existing databases. A name that begins like one of them and does not
decode is an ordinary checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args
from urllib.parse import parse_qs, quote, unquote, urlencode

from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.types import KeyRange, ManifestId, Seq, Ulid, WalId

_RETENTION: Final = "flagstone.log-pin/"
_LOAD: Final = "flagstone.load/"
_DESTROYED: Final = "flagstone.destroyed/"
_CLONE: Final = "flagstone.clone/"
_PARALLEL_WAL: Final = "flagstone.parallel-wal/"

# -- retention checkpoints ----------------------------------------------------------------------------------

UNKNOWN_SEQ: Final = -1
"""`Position.after_seq` of a consumer that starts at a WAL file: the sequence numbers before the file are unknown."""

RETENTION_MANIFEST_ID: Final = ManifestId(0)
"""The manifest that every retention checkpoint names. It is replaced in place: never take it from a cache."""

_NO_END: Final = WalId(2**62)
"""Above every WAL id. Not the largest number: SlateDB's garbage collector adds one to it."""


class Position(NamedTuple):
    """Where a consumer of changes continues. A plain tuple, which the consumer can store with its own results.

    The consumer needs the WAL files from `next_id` on, and all changes above `after_seq`. It has used the first
    `loaded` rows of the first bulk load above `after_seq`. With `copied=False` it has not finished its copy of the
    database, and starts over after an interruption.
    """

    next_id: WalId
    after_seq: int = UNKNOWN_SEQ
    loaded: int = 0
    copied: bool = True


class HeldRetention(NamedTuple):
    """A retention checkpoint of a manifest, decoded."""

    checkpoint: Checkpoint
    name: str
    position: Position


def encode_retention(name: str, position: Position) -> str:
    """The checkpoint name for the consumer `name` at that position."""
    return (
        f"{_RETENTION}{quote(name, safe='')}"
        f"?next={position.next_id}&after={position.after_seq}&copied={int(position.copied)}"
        f"{f'&loaded={position.loaded}' if position.loaded else ''}"
    )


def decode_retention(checkpoint: Checkpoint) -> HeldRetention | None:
    """The retention checkpoint in `checkpoint`; None for any other checkpoint."""
    parts = _split(checkpoint, _RETENTION)
    if parts is None or checkpoint.manifest_id != RETENTION_MANIFEST_ID:
        return None
    name, fields = parts
    try:
        position = Position(
            WalId(int(fields["next"])),
            int(fields["after"]),
            int(fields.get("loaded", "0")),
            copied=bool(int(fields["copied"])),
        )
    except (KeyError, ValueError):
        return None
    return HeldRetention(checkpoint, unquote(name), position)


def held_retentions(manifest: Manifest) -> list[HeldRetention]:
    """The retention checkpoints of a manifest."""
    return [held for entry in manifest.checkpoints if (held := decode_retention(entry)) is not None]


def find_retention(manifest: Manifest, name: str) -> HeldRetention | None:
    """The retention checkpoint of the consumer `name`."""
    return next((held for held in held_retentions(manifest) if held.name == name), None)


def retention_manifest(start: WalId, *, salt: int) -> Manifest:
    """Manifest 0: it keeps every WAL file above `start`, without an end, and no SST.

    `salt` is random, so that no two versions have the same bytes and the same entity tag. The manifest is not
    initialized: no reader opens it.
    """
    return Manifest(initialized=False, writer_epoch=salt, replay_after_wal_id=start, wal_id_last_seen=_NO_END)


# -- load records -------------------------------------------------------------------------------------------

LoadState = Literal["loading", "ready", "done", "refused"]
_LOAD_STATES: Final[tuple[LoadState, ...]] = get_args(LoadState)
_NO_STOP: Final = "end"

LOAD_TAG_BITS: Final = 32
_LOAD_RANDOM_BITS: Final = 48
"""A ULID has 80 bits behind its time: the tag of the load, and a random part for each of its SSTs."""


class LoadPosition(NamedTuple):
    """The last sequence number and the last WAL file before a bulk load."""

    seq: Seq
    wal_id: WalId


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """A bulk load: its sequence number, the time in the ids of its SSTs, and its state.

    `reason` says why the writer refused it, or that it was cancelled. Of several open loads of one `owner` only the
    last counts; "" is no owner. The ids of its SSTs have the time `id_ms` and then `tag`; None is a load without a tag,
    as earlier versions made them. `renumbered` counts how often the load got another sequence number.

    A load that is done has a `position` among the changes. Its checkpoint then names the manifest that added the load,
    in which its SSTs are the newest sorted run; for a load that `replaces` data, the manifest before.

    A range delete has the record of a load that is done, without SSTs; `deleted` are its keys, `id_ms` is its time. It
    also says `replaces`: a consumer that does not know range deletes then ends with an error.
    """

    state: LoadState
    seq: Seq
    id_ms: int
    reason: str = ""
    owner: str = ""
    position: LoadPosition | None = None
    replaces: bool = False
    tag: int | None = None
    renumbered: int = 0
    deleted: KeyRange | None = None

    @property
    def open(self) -> bool:
        """Whether the load may still become part of the database."""
        return self.state in ("loading", "ready")

    @property
    def id_prefix(self) -> int | None:
        """What the ids of all SSTs of the load begin with; None without a tag."""
        return None if self.tag is None else self.id_ms << LOAD_TAG_BITS | self.tag

    def owns(self, sst_id: Ulid) -> bool:
        """Whether an SST of that id belongs to the load."""
        return self.id_prefix == load_prefix_of(sst_id)

    def sst_id(self, random: int) -> Ulid:
        """The id of an SST of the load; of `random` the last bits are used."""
        return load_sst_id(self.id_ms, self.tag or 0, random)


def load_prefix_of(sst_id: Ulid) -> int:
    """What the ids of all SSTs of one load have in common, if the SST belongs to one."""
    return sst_id >> _LOAD_RANDOM_BITS


def load_sst_id(id_ms: int, tag: int, random: int) -> Ulid:
    """The id of an SST of a load: the time and the tag of the load, and the last bits of `random`."""
    low = random & ((1 << _LOAD_RANDOM_BITS) - 1)
    return Ulid((id_ms << LOAD_TAG_BITS | tag) << _LOAD_RANDOM_BITS | low)


class HeldLoad(NamedTuple):
    """A load record of a manifest, with its checkpoint."""

    checkpoint: Checkpoint
    record: LoadRecord


def encode_load(record: LoadRecord) -> str:
    """The checkpoint name for a load record."""
    fields: dict[str, int | str] = {"seq": record.seq, "id_ms": record.id_ms}
    fields |= {"reason": record.reason, "owner": record.owner}
    if record.tag is not None:
        fields["tag"] = record.tag
    if record.renumbered:
        fields["renumbered"] = record.renumbered
    if record.position is not None:
        fields |= {
            "after": record.position.seq,
            "after_wal": record.position.wal_id,
            "replaces": int(record.replaces),
        }
    if record.deleted is not None:
        start, stop = record.deleted.start, record.deleted.stop
        fields["from"] = (start or b"").hex()
        fields["to"] = _NO_STOP if stop is None else stop.hex()
    return f"{_LOAD}{record.state}?{urlencode(fields)}"


def held_loads(manifest: Manifest) -> Iterator[HeldLoad]:
    """The load records of a manifest."""
    for checkpoint in manifest.checkpoints:
        record = _decode_load(checkpoint)
        if record is not None:
            yield HeldLoad(checkpoint, record)


def _decode_load(checkpoint: Checkpoint) -> LoadRecord | None:
    parts = _split(checkpoint, _LOAD)
    if parts is None:
        return None
    stored_state, fields = parts
    state = next((known for known in _LOAD_STATES if known == stored_state), None)
    if state is None:
        return None
    try:
        position = None
        if "after" in fields:
            position = LoadPosition(Seq(int(fields["after"])), WalId(int(fields["after_wal"])))
        deleted = None
        if "to" in fields:
            stop = None if fields["to"] == _NO_STOP else bytes.fromhex(fields["to"])
            deleted = KeyRange(bytes.fromhex(fields["from"]) or None, stop)
        return LoadRecord(
            state,
            Seq(int(fields["seq"])),
            int(fields["id_ms"]),
            fields["reason"],
            fields["owner"],
            position,
            replaces=fields.get("replaces", "0") != "0",
            tag=int(fields["tag"]) if "tag" in fields else None,
            renumbered=int(fields.get("renumbered", "0")),
            deleted=deleted,
        )
    except (KeyError, ValueError):
        return None


# -- destruction marks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Destroyed:
    """When a database was destroyed, how long it is kept after that, and the epochs its destroyer claimed.

    `fence_id` is the WAL file that ends the WAL for every former writer; None until it is written. `wal_shift` is by
    how much the WAL ids of a clone made at a vacant path are higher than those of its source.
    """

    at_ms: int
    grace_ms: int
    writer_epoch: int
    compactor_epoch: int
    fence_id: WalId | None = None
    erased: bool = False
    wal_shift: int = 0

    @property
    def due_ms(self) -> int:
        """The time from which the database may be deleted."""
        return self.at_ms + self.grace_ms


class MarkEntry(NamedTuple):
    """A destruction mark of a manifest, with its checkpoint."""

    checkpoint: Checkpoint
    mark: Destroyed


def is_record(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint only records something about the database: no reader or user needs its state."""
    name = checkpoint.name
    return name is not None and name.startswith((_DESTROYED, _PARALLEL_WAL))


def mark_entries(manifest: Manifest) -> list[MarkEntry]:
    """The destruction marks of a manifest."""
    found = ((entry, _decode_mark(entry)) for entry in manifest.checkpoints)
    return [MarkEntry(entry, mark) for entry, mark in found if mark is not None]


def encode_mark(mark: Destroyed) -> str:
    """The checkpoint name for a destruction mark."""
    fields: dict[str, int] = {
        "at_ms": mark.at_ms,
        "grace_ms": mark.grace_ms,
        "writer": mark.writer_epoch,
        "compactor": mark.compactor_epoch,
    }
    if mark.fence_id is not None:
        fields["fence"] = mark.fence_id
    if mark.wal_shift:
        fields["wal_shift"] = mark.wal_shift
    return f"{_DESTROYED}{'erased' if mark.erased else 'pending'}?{urlencode(fields)}"


def _decode_mark(checkpoint: Checkpoint) -> Destroyed | None:
    parts = _split(checkpoint, _DESTROYED)
    if parts is None or parts[0] not in ("pending", "erased"):
        return None
    state, fields = parts
    try:
        return Destroyed(
            int(fields["at_ms"]),
            int(fields["grace_ms"]),
            int(fields["writer"]),
            int(fields["compactor"]),
            WalId(int(fields["fence"])) if "fence" in fields else None,
            erased=state == "erased",
            wal_shift=int(fields.get("wal_shift", "0")),
        )
    except (KeyError, ValueError):
        return None


# -- final checkpoints --------------------------------------------------------------------------------------


def final_name(borrower: str) -> str:
    """The name of the checkpoints that a lender keeps for the clone at the path `borrower`."""
    return _CLONE + quote(borrower, safe="/")


def borrower_of(checkpoint: Checkpoint) -> str | None:
    """The path of the clone for which a final checkpoint is kept; None for any other checkpoint."""
    name = checkpoint.name or ""
    return unquote(name.removeprefix(_CLONE)) if name.startswith(_CLONE) else None


# -- parallel WAL files -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParallelWal:
    """The record of writers that send several WAL files at once; see `flagstone.metadata.parallel_wal`."""

    limit: int
    through: WalId | None
    settled_epoch: int
    epoch: int


def encode_parallel_wal(record: ParallelWal) -> str:
    """The checkpoint name for the record."""
    fields = {"settled": record.settled_epoch, "epoch": record.epoch}
    if record.through is not None:
        fields["through"] = record.through
    return f"{_PARALLEL_WAL}{record.limit}?{urlencode(fields)}"


def decode_parallel_wal(checkpoint: Checkpoint) -> ParallelWal | None:
    """The record in `checkpoint`; None for any other checkpoint."""
    parts = _split(checkpoint, _PARALLEL_WAL)
    if parts is None:
        return None
    limit, fields = parts
    try:
        through = WalId(int(fields["through"])) if "through" in fields else None
        return ParallelWal(int(limit), through, int(fields["settled"]), int(fields["epoch"]))
    except (KeyError, ValueError):
        return None


# -- compaction coordinators --------------------------------------------------------------------------------


def coordinator_left(epoch: int) -> str:
    """The worker id by which the coordinator of that epoch records, on a finished job, that it has left."""
    return f"coordinator {epoch} has left"


def _split(checkpoint: Checkpoint, prefix: str) -> tuple[str, dict[str, str]] | None:
    """The part of the name between `prefix` and "?", and the fields after it; None for another prefix."""
    name = checkpoint.name
    if name is None or not name.startswith(prefix):
        return None
    head, _, query = name.removeprefix(prefix).partition("?")
    return head, {key: values[0] for key, values in parse_qs(query, keep_blank_values=True).items()}
