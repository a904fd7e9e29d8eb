"""The commit log: a transactional table that decides conditional writes where the object store cannot.

It has one record for every destination that was written conditionally. Only `replace` changes a record, and it
compares the whole identity of the record that was read. So no transaction is longer than one statement: any table
with a unique key and a conditional update can be a commit log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class RecordState(StrEnum):
    """The state of the latest intent for a destination."""

    PENDING = "pending"
    """Decided, but perhaps not yet copied to the destination."""
    COMMITTED = "committed"
    """Copied to the destination."""
    DELETED = "deleted"
    """Deleted. The record outlives the object, so that a stalled creator is still refused."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The latest decided intent for `destination`."""

    destination: str
    """The path that callers use; unique in the commit log."""
    source: str
    """The temporary object that holds the bytes; unique to this one write."""
    version: int
    """1 for the creation, one more for every replacement or deletion."""
    state: RecordState
    created_ms: int
    """When this intent was recorded, by its writer's clock."""
    token: str | None = None
    """The write token of the caller, if any."""
    replaced: str | None = None
    """The source that this intent superseded."""


class CommitLog(Protocol):
    """A durable map from destination to `CommitRecord`. All methods may be called from many threads at once.

    A method that returned has taken effect for every other process. A method that raised `Unavailable` may
    or may not have taken effect; sources are unique, so the caller learns it by reading the record.
    """

    def find(self, destination: str) -> CommitRecord | None:
        """The record of that destination, never an outdated one."""
        ...

    def insert(self, record: CommitRecord) -> bool:
        """Add a record; False when its destination has one already."""
        ...

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        """Change the record if its version, source and state are still those of `old`; False otherwise.

        Both have the same destination.
        """
        ...

    def remove(self, record: CommitRecord) -> bool:
        """Remove the record if its version, source and state are still the given ones; False otherwise."""
        ...

    def pending(self, prefix: str) -> list[CommitRecord]:
        """Every pending record below the folder `prefix` ("" is all), from an index, never outdated."""
        ...

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        """Every record below the folder `prefix` ("" is all), ascending by destination."""
        ...

    def close(self) -> None:
        """Release the connections of this process. The next use opens them again."""
        ...


def folder_bounds(prefix: str) -> tuple[str, str] | None:
    """The half-open range of destinations below a folder, in code point order; None is all of them."""
    if not prefix:
        return None
    return f"{prefix}/", f"{prefix}0"  # "0" follows "/" directly
