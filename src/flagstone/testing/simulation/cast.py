"""Which processes take part in a world besides its writers, readers and operator."""

from __future__ import annotations

from random import Random
from typing import Final, Literal

Role = Literal[
    "compactor",
    "only_compactor",
    "worker",
    "consumer",
    "feed",
    "cloner",
    "clone_writer",
    "loader",
    "segments",
    "two_phase",
    "wal_store",
    "damage",
    "restore",
    "range_reads",
    "aio",
    "range_deletes",
]

ROLES: Final[dict[Role, float]] = {
    "compactor": 0.25,
    "only_compactor": 0.5,
    "worker": 0.25,
    "consumer": 0.3,
    "feed": 0.3,
    "cloner": 0.3,
    "clone_writer": 0.5,
    "loader": 0.3,
    "segments": 0.2,
    "two_phase": 0.15,
    "wal_store": 0.15,
    "damage": 0.2,
    "restore": 0.2,
    "range_reads": 0.3,
    "aio": 0.25,
    "range_deletes": 0.35,
}
"""How many of the worlds have the role. With `only_compactor` the writers have no compactor if another process has.

Some are no processes: keys have segments, a commit log decides conditional writes, the WAL has a store of its own,
stored objects are damaged, transactions also read ranges, and writers delete ranges.
"""


def draw_cast(seed: int) -> frozenset[Role]:
    """The roles of a seed's world. A generator of its own: other choices of the plan do not change them."""
    draw = Random(f"cast {seed}")
    return frozenset(role for role, rate in ROLES.items() if draw.random() < rate)
