"""The transactional table that decides conditional writes where the object store cannot.

One record per destination ever written conditionally. A record is only ever changed by `replace`, which
compares the whole identity of the record it read, so a log needs no transaction longer than one statement:
any table with a unique key and a conditional update will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class RecordState(StrEnum):
    """Where the latest intent for a destination stands."""

    PENDING = "pending"
    """Decided, but perhaps not yet copied to the destination."""
    COMMITTED = "committed"
    """Copied to the destination."""
    DELETED = "deleted"
    """Removed. The record outlives the object so that a stalled creator is still refused."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The latest decided intent for `destination`."""

    destination: str
    """The path callers use; unique in the log."""
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
    or may not have taken effect; unique sources let the caller find out by reading.
    """

    def find(self, destination: str) -> CommitRecord | None:
        """The record of that destination, never a stale one."""
        ...

    def insert(self, record: CommitRecord) -> bool:
        """Add a record; False when its destination has one already."""
        ...

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        """Change the record if its version, source and state still are those of `old`; False otherwise.

        Both have the same destination.
        """
        ...

    def remove(self, record: CommitRecord) -> bool:
        """Forget the record if its version, source and state are still the given ones; False otherwise."""
        ...

    def pending(self, prefix: str) -> list[CommitRecord]:
        """Every pending record below the folder `prefix` ("" is all), from an index, never stale."""
        ...

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        """Every record below the folder `prefix` ("" is all), ascending by destination."""
        ...

    def close(self) -> None:
        """Release connections of this process. A closed log opens itself again when used."""
        ...


def folder_bounds(prefix: str) -> tuple[str, str] | None:
    """The half-open range of destinations below a folder, in code point order; None is all of them."""
    if not prefix:
        return None
    return f"{prefix}/", f"{prefix}0"  # "0" follows "/" directly
