"""The history of a database, as the oracle keeps it: writes, versions of keys, transactions, the branch of each writer.

Values and pure functions on them. Values are unique, so a row in a database leads back to one write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flagstone.types import Row

Kind = Literal["put", "delete", "merge"]


class Violation(AssertionError):
    """The database showed what it must not show."""


class Change(NamedTuple):
    """One row of a write. The value of a merge is one token that ends with `;`."""

    kind: Kind
    key: bytes
    value: bytes = b""
    expires_ms: int | None = None


class Version(NamedTuple):
    """A row of the history."""

    seq: int
    kind: Kind
    value: bytes
    expires_ms: int | None


@dataclass(slots=True, eq=False)
class Intent:
    """A write: before its call returns, and if it fails, `seq` is None."""

    changes: tuple[Change, ...]
    seq: int | None = None
    dropped: bool = False
    planned_seq: int | None = None
    """The sequence number of a bulk load, which is known before the load is added."""
    deleted: tuple[bytes, bytes] | None = None
    """The start and the end of a range delete: `changes` deletes every key that may be in the range."""


class Commit(NamedTuple):
    """A transaction that read at `start`, committed at `end`, and depends on these keys and on this range of keys."""

    start: int
    end: int
    keys: frozenset[bytes]
    scanned: tuple[bytes, bytes] | None = None

    def depends_on(self, key: bytes) -> bool:
        return key in self.keys or (self.scanned is not None and self.scanned[0] <= key < self.scanned[1])


class Restore(NamedTuple):
    """From sequence number `seq` on the database shows these rows, and what was written since."""

    seq: int
    rows: dict[bytes, Version]


class Found(NamedTuple):
    """What a writer showed right after it opened, and between which times."""

    rows: dict[bytes, bytes]
    now: tuple[int, int]


@dataclass(slots=True, eq=False)
class Branch:
    """The writes of one writer, on top of the trunk up to `base_seq`."""

    epoch: int
    base_seq: int
    versions: dict[bytes, list[Version]] = field(default_factory=dict)
    intents: dict[int, Intent] = field(default_factory=dict)
    open_intents: list[Intent] = field(default_factory=list)
    joined: bool = False
    audited: bool = False
    """Whether the rows that it found have settled the writes in doubt before it."""
    found: Found | None = None
    commits: list[Commit] = field(default_factory=list)
    """The transactions that have committed, by ascending sequence number."""


def seq_of(version: Version) -> int:
    return version.seq


def in_doubt(branches: Iterable[Branch], key: bytes) -> list[Change]:
    """The changes of a key by writes whose outcome is in doubt."""
    return [
        change
        for branch in branches
        for intent in branch.open_intents
        for change in intent.changes
        if change.key == key
    ]


def extends(fold: bytes, parts: list[bytes], operands: set[bytes]) -> bool:
    """Whether the parts are the known value with operands in doubt that it does not have yet.

    An operand that is in doubt may be a part of the known value: a new writer has found it.
    """
    added = operands.difference(tokens_of(fold))
    return b"".join(part for part in parts if part not in added) == fold


def check_commits(branch: Branch, key: bytes, seq: int) -> None:
    """Raise `Violation` if a write of this key at `seq` lies inside a transaction that depends on the key."""
    for commit in reversed(branch.commits):
        if commit.end <= seq:
            return
        check_commit(commit, key, seq)


def check_commit(commit: Commit, key: bytes, seq: int) -> None:
    if commit.start < seq < commit.end and commit.depends_on(key):
        raise Violation(
            f"the transaction from {commit.start} to {commit.end} committed, but write {seq} changed {key!r}"
        )


def insert_version(versions: dict[bytes, list[Version]], change: Change, seq: int) -> None:
    of_key = versions.setdefault(change.key, [])
    of_key.insert(
        bisect_right(of_key, seq, key=seq_of), Version(seq, change.kind, change.value, change.expires_ms)
    )


def shows(change: Change, row: Row) -> bool:
    """Whether a row of a database comes from this change."""
    if change.key != row.key:
        return False
    if change.kind == "merge":
        return tokens_of(row.value)[-1:] == [change.value]
    return change.kind == "put" and row.value == change.value


def tokens_of(value: bytes) -> list[bytes]:
    """The parts of a value: each merge operand is one, with its `;`."""
    return [token + b";" for token in value.split(b";") if token]
