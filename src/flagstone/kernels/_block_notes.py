"""What an SST needs of its blocks: the interpreted form. `_block_notes.pxd` has the compiled form, see `_bytes`."""

from __future__ import annotations

from array import array
from typing import Any

from flagstone.kernels._siphash import siphash


class Notes:
    """Bounds, index key and row counts of each finished block; where wanted, the hash and the bytes of each key."""

    __slots__ = ("hashes", "index_keys", "keys", "marked", "records", "want_hashes", "want_keys")

    def __init__(self, want_hashes: bool, want_keys: bool) -> None:
        self.want_hashes = want_hashes
        self.want_keys = want_keys
        self.records: list[tuple[int, int, int, int, int]] = []
        self.index_keys: list[bytes] = []
        self.hashes = array("Q")
        self.keys: list[bytes] = []
        self.marked = (0, 0)


def new_notes(want_hashes: bool, want_keys: bool) -> Notes:
    return Notes(want_hashes, want_keys)


def have_memory(_notes: Notes) -> bool:
    """Whether C had memory for the notes."""
    return True


def free_notes(notes: Notes) -> None:
    """Give the memory back."""
    notes.records, notes.index_keys, notes.keys = [], [], []


def note_key(notes: Notes, key: Any, at: int, size: int) -> bool:
    """Note the key of a row; False when there is no memory."""
    if notes.want_hashes:
        notes.hashes.append(siphash(key, at, size))
    if notes.want_keys:
        notes.keys.append(bytes(key[at : at + size]))
    return True


def mark_keys(notes: Notes) -> None:
    """Remember which keys are noted so far."""
    notes.marked = (len(notes.hashes), len(notes.keys))


def forget_keys(notes: Notes) -> None:
    """Forget the keys that were noted since `mark_keys`."""
    hashes, keys = notes.marked
    del notes.hashes[hashes:], notes.keys[keys:]


def note_block(
    notes: Notes, start: int, stop: int, key: Any, at: int, size: int, puts: int, deletes: int, merges: int
) -> bool:
    """Note a block from `start` to `stop`, its index key and its row counts; False when there is no memory."""
    notes.index_keys.append(bytes(key[at : at + size]))
    notes.records.append((start, stop, puts, deletes, merges))
    return True


def noted_blocks(notes: Notes) -> int:
    """How many blocks were noted since `take_notes`."""
    return len(notes.records)


def take_notes(notes: Notes, base: int, bounds: Any) -> tuple[Any, ...]:
    """Hand out and forget all: `(offsets, index_keys, counts, hashes, keys)`.

    Fills `bounds` with begin and end of each block. The offsets are the begins plus `base`.
    """
    offsets: list[int] = []
    counts: list[int] = []
    for number, (start, stop, puts, deletes, merges) in enumerate(notes.records):
        bounds[2 * number], bounds[2 * number + 1] = start, stop
        offsets.append(base + start)
        counts += (puts, deletes, merges)
    taken = offsets, notes.index_keys, counts, notes.hashes.tobytes(), notes.keys
    notes.records, notes.index_keys, notes.hashes, notes.keys = [], [], array("Q"), []
    return taken
