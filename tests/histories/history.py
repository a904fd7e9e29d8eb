"""What clients did to a database and when: the input of the checker.

Time is a counter that every call increments when it begins and when it has returned. So one call happened before
another exactly if its `end` is below the other's `begin`; otherwise they overlapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

Isolation = Literal["snapshot", "serializable"]
Kind = Literal["put", "delete", "merge"]

Seen = tuple[bytes, bytes | None]
"""A key and the value a read found, or None."""
Written = tuple[bytes, Kind, bytes]
"""A key, what was done to it, and the value or operand. Every value and operand of a history is unique."""


@dataclass(slots=True)
class Op:
    """One call, or one transaction or snapshot with all its calls."""

    name: str
    client: int
    begin: int
    end: int
    seen: list[Seen] = field(default_factory=list)
    """What it read of others. For a scan, every key of the range: None where there was no row."""
    wrote: list[Written] = field(default_factory=list)
    own: list[tuple[bytes, list[tuple[Kind, bytes]], bytes | None]] = field(default_factory=list)
    """What a transaction read of keys that it had written: the key, what it had done to it, the value it found."""
    seq: int | None = None
    """The sequence number under which its writes were committed."""
    at: int | None = None
    """The sequence number at which snapshots and transactions claim to read."""
    looked: int | None = None
    """When the call returned that fixed the moment it reads at; the other reads of it may come later."""
    isolation: Isolation | None = None
    durable: bool = False
    """A write or flush that waited for the store, or a read of what is on the store only."""
    committed: bool = True

    def __str__(self) -> str:
        parts = [f"{self.name} of client {self.client} [{self.begin}, {self.end}]"]
        parts += [f"committed as {self.seq}"] if self.seq is not None else []
        parts += [f"reading at {self.at}"] if self.at is not None else []
        parts += [f"saw {dict(self.seen)}"] if self.seen else []
        parts += [f"wrote {self.wrote}"] if self.wrote else []
        return ", ".join(parts)


class Recorder:
    """The time, and what one client did. `next` of a counter is one step for all threads."""

    _time = count(1)

    def __init__(self, client: int) -> None:
        self.client = client
        self.ops: list[Op] = []

    def now(self) -> int:
        return next(self._time)

    def add(self, name: str, begin: int, **facts: object) -> Op:
        op = Op(name, self.client, begin, self.now(), **facts)  # type: ignore[arg-type]
        self.ops.append(op)
        return op


def apply(state: bytes | None, writes: Iterable[tuple[Kind, bytes]]) -> bytes | None:
    """The value of a key after these writes; a merge appends."""
    for kind, value in writes:
        state = value if kind == "put" else None if kind == "delete" else (state or b"") + value
    return state
