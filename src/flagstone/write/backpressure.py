"""When writers and uploads must wait: pure rules over sizes and key ranges.

Two gates in a row. An upload waits while L0 is too deep, because every read looks into each L0 SST that may
hold its key. Memtables that cannot be uploaded then fill memory, and at its limit writers wait: what is written
faster than it can be compacted slows its writers down instead of its readers, and never grows without bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flagstone.types import KeyRange

PauseReason = Literal["unflushed_bytes", "num_ssts", "num_ssts_per_key"]
"""The last two are the values of the label `type` of `slatedb.db.l0_stall_count`."""

_Position = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Pause:
    """Why something waits, and in words for the operator what would end it."""

    reason: PauseReason
    message: str


@dataclass(frozen=True, slots=True)
class L0Pressure:
    """One tree and the SST about to join its L0.

    `live` are the effective ranges of its L0 views, `in_flight` the ranges of SSTs whose upload or manifest
    commit is under way, and `SST` that of the next one.
    """

    live: Sequence[KeyRange]
    in_flight: Sequence[KeyRange]
    sst: KeyRange
    segment: bytes = b""


def plan_write_pause(
    *, unflushed_bytes: int, max_unflushed_bytes: int, upload_pause: Pause | None = None
) -> Pause | None:
    """Why a writer has to wait before it may add more, or None when it may go on.

    `upload_pause` is what holds up the oldest memtable, if anything does: it tells the operator what to look at.
    A single write may go past the limit, so that one larger than the limit itself is not stuck for ever.
    """
    if unflushed_bytes < max_unflushed_bytes:
        return None
    cause = "the upload is under way" if upload_pause is None else upload_pause.message
    return Pause(
        "unflushed_bytes",
        f"{unflushed_bytes} bytes are not in SSTs yet, max_unflushed_bytes is {max_unflushed_bytes}: {cause}",
    )


def plan_upload_pause(
    loads: Iterable[L0Pressure], *, l0_max_ssts: int, l0_max_ssts_per_key: int
) -> Pause | None:
    """Why the SSTs of the next memtable must not be uploaded yet, or None when they may.

    A memtable makes one SST per segment it touches, and they are committed together: all of `loads` must have
    room. With room for exactly one SST it may go. Only keys of the new SST count for the limit per key:
    a deep spot elsewhere gets no deeper by it.
    """
    for load in loads:
        where = f" of segment {load.segment!r}" if load.segment else ""
        ssts = len(load.live) + len(load.in_flight)
        if ssts >= l0_max_ssts:
            return Pause(
                "num_ssts",
                f"L0{where} has {ssts} SSTs, l0_max_ssts is {l0_max_ssts}: waiting for compaction",
            )
        depth = deepest_cover((*load.live, *load.in_flight), load.sst)
        if depth >= l0_max_ssts_per_key:
            return Pause(
                "num_ssts_per_key",
                f"some key is in the range of {depth} SSTs of L0{where}, l0_max_ssts_per_key is "
                f"{l0_max_ssts_per_key}: waiting for compaction",
            )
    return None


def deepest_cover(ranges: Iterable[KeyRange], within: KeyRange) -> int:
    """The greatest number of `ranges` that one key of `within` lies in."""
    edges: list[tuple[_Position, int]] = []
    for keys in ranges:
        cut = keys.intersect(within)
        if not cut.empty:
            edges.append(((0, b"") if cut.start is None else (1, cut.start), 1))
            edges.append(((2, b"") if cut.stop is None else (1, cut.stop), -1))
    deepest = depth = 0
    # Stops are exclusive: where one range stops and another starts they do not overlap, so stops come first.
    for _, step in sorted(edges):
        depth += step
        deepest = max(deepest, depth)
    return deepest
