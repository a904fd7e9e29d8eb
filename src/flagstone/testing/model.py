"""A model of a database: what it must return, computed the slow and obvious way.

The model keeps every row of every key, with its sequence number, kind, value, creation and expiry. A read sees the
rows up to one sequence number, as in the engine; merging is concatenation. A crash or a second writer cuts the history:
a prefix of the commits remains, which its last sequence number identifies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flagstone.types import MERGE, TOMBSTONE, VALUE, KeyRange, Row

Change = tuple[bytes, int, bytes, int | None]
"""(key, kind, value, ttl_ms)"""


@dataclass(frozen=True, slots=True)
class Version:
    """One row of one key."""

    seq: int
    kind: int
    value: bytes
    created_ms: int | None
    expires_ms: int | None

    def expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms


@dataclass(slots=True)
class Model:
    """All rows of all keys, oldest first, and the keys that each commit wrote."""

    versions: dict[bytes, list[Version]] = field(default_factory=dict)
    commits: dict[int, frozenset[bytes]] = field(default_factory=dict)
    deletes: dict[int, KeyRange] = field(default_factory=dict)
    last_seq: int = 0

    def commit(self, seq: int, created_ms: int, changes: Iterable[Change]) -> None:
        """One write: the operations on a key are combined in order, and all keys get the same sequence number."""
        folded = fold_changes(changes)
        for key, (kind, value, ttl_ms) in folded.items():
            expires_ms = None if ttl_ms is None else created_ms + ttl_ms
            self.versions.setdefault(key, []).append(Version(seq, kind, value, created_ms, expires_ms))
        self.commits[seq] = frozenset(folded)
        self.last_seq = seq

    def delete_range(self, seq: int, created_ms: int, keys: KeyRange) -> None:
        """A range delete with a sequence number of its own."""
        self.commit(seq, created_ms, [(key, TOMBSTONE, b"", None) for key in self.versions if key in keys])
        self.deletes[seq] = keys

    def cut(self, last_seq: int) -> None:
        """Remove all commits after `last_seq`."""
        for key, versions in list(self.versions.items()):
            self.versions[key] = [version for version in versions if version.seq <= last_seq]
        self.commits = {seq: keys for seq, keys in self.commits.items() if seq <= last_seq}
        self.deletes = {seq: keys for seq, keys in self.deletes.items() if seq <= last_seq}
        self.last_seq = last_seq

    def read(
        self, key: bytes, seq: int, now_ms: int, own: Iterable[Change] = (), own_seq: int = 0
    ) -> Row | None:
        """The row that a read at `seq` returns, with the transaction's own uncommitted changes on top."""
        seen = [version for version in self.versions.get(key, ()) if version.seq <= seq]
        mine = fold_changes(change for change in own if change[0] == key).get(key)
        if mine is not None:
            kind, value, ttl_ms = mine
            seen.append(Version(own_seq, kind, value, None, None if ttl_ms is None else now_ms + ttl_ms))
        parts: list[Version] = []
        for version in reversed(seen):
            if version.kind == MERGE:
                if not version.expired(now_ms):
                    parts.append(version)
                continue
            if version.kind == VALUE and not version.expired(now_ms):
                parts.append(version)
            break
        if not parts:
            return None
        expiries = [part.expires_ms for part in parts if part.expires_ms is not None]
        return Row(
            key,
            b"".join(part.value for part in reversed(parts)),
            parts[0].seq,
            max((part.created_ms for part in parts if part.created_ms is not None), default=None),
            min(expiries, default=None),
        )

    def scan(
        self,
        keys: KeyRange,
        seq: int,
        now_ms: int,
        *,
        reverse: bool = False,
        own: Iterable[Change] = (),
        own_seq: int = 0,
    ) -> list[Row]:
        """The rows of a range, in ascending or descending order."""
        mine = list(own)
        every = {*self.versions, *(change[0] for change in mine)}
        rows = (
            self.read(key, seq, now_ms, mine, own_seq)
            for key in sorted(every, reverse=reverse)
            if key in keys
        )
        return [row for row in rows if row is not None]

    def touched_since(self, seq: int) -> set[bytes]:
        """The keys that commits after `seq` wrote."""
        return {key for committed, keys in self.commits.items() if committed > seq for key in keys}


def fold_changes(changes: Iterable[Change]) -> dict[bytes, tuple[int, bytes, int | None]]:
    """The row that a batch writes for each key. A merge is applied to the earlier operation on the key in the batch."""
    folded: dict[bytes, tuple[int, bytes, int | None]] = {}
    for key, kind, value, ttl_ms in changes:
        before = folded.get(key)
        if kind != MERGE or before is None:
            folded[key] = (kind, value, ttl_ms)
        elif before[0] == TOMBSTONE:
            folded[key] = (VALUE, value, ttl_ms)
        else:
            folded[key] = (before[0], before[1] + value, before[2])
    return folded
