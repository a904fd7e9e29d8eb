"""A database of the world, with everything that it must show."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from flagstone.testing.simulation.oracle import Oracle

MAIN_PATH = "db"


class Concatenation:
    """The merge operator of simulated databases."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:  # noqa: ARG002
        return (existing or b"") + operand


@dataclass(slots=True, eq=False)
class TrackedDatabase:
    """A path, the history of its writes, and the rows of its checkpoints."""

    path: str = MAIN_PATH
    oracle: Oracle = field(default_factory=Oracle)
    checkpoints: dict[UUID, dict[bytes, bytes]] = field(default_factory=dict)
    loads_begun_ns: dict[int, int] = field(default_factory=dict)
    """When each bulk load began, by its sequence number."""
    destroyed: bool = False
    """Whether a process has begun to destroy it."""
