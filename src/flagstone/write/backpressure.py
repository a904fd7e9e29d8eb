"""When writers and uploads must wait: pure rules over sizes and key ranges.

Writers that are ahead of the flushes slow down first: memory would only delay the moment at which they have to.

An upload waits while L0 has too many SSTs, because every read searches each L0 SST that may hold its key. Memtables
that wait for their upload fill memory, and at the limit writers wait. So if writes are faster than compaction, writers
slow down, reads do not, and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from flagstone.types import KeyRange

PauseReason = Literal["unflushed_bytes", "num_ssts", "num_ssts_per_key"]
"""The last two are the values of the label `type` of `slatedb.db.l0_stall_count`."""

_MEMTABLES_AHEAD: Final = 3
_SLOWEST_BYTES_PER_S: Final = 32 << 20
"""Writers that slow down go on at this rate, however slow the uploads are."""

_Position = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Pause:
    """Why a write or an upload waits; the message tells the operator what ends the wait."""

    reason: PauseReason
    message: str


@dataclass(frozen=True, slots=True)
class L0Pressure:
    """One tree, and the next SST of its L0.

    `live` are the effective ranges of its L0 views, `in_flight` the ranges of SSTs that are uploaded or committed now,
    and `added` is the range of the next SST.
    """

    live: Sequence[KeyRange]
    in_flight: Sequence[KeyRange]
    added: KeyRange
    segment: bytes = b""


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """From how many bytes on that are in memory and not yet in SSTs writers slow down, and from how many they stop."""

    slow_from_bytes: int
    stop_at_bytes: int
    slow_s: float
    """How long a writer waits for a flush when it has filled a memtable and is ahead of the flushes."""


def plan_write_limits(*, l0_sst_size_bytes: int, max_unflushed_bytes: int) -> WriteLimits:
    """The limits for these settings. A process whose limit is small does not slow down: it has little to save."""
    if max_unflushed_bytes <= (_MEMTABLES_AHEAD + 1) * l0_sst_size_bytes:
        slow_from = max_unflushed_bytes + 1
    else:
        slow_from = max(_MEMTABLES_AHEAD * l0_sst_size_bytes, max_unflushed_bytes // 6)
    return WriteLimits(slow_from, max_unflushed_bytes, l0_sst_size_bytes / _SLOWEST_BYTES_PER_S)


def plan_write_pause(
    *, unflushed_bytes: int, max_unflushed_bytes: int, upload_pause: Pause | None = None
) -> Pause | None:
    """Why a write has to wait, or None if it may proceed.

    `upload_pause` is why the oldest memtable waits, if it does; the message includes it for the operator. A write that
    starts below the limit may exceed it, so a write larger than the limit never waits forever.
    """
    if unflushed_bytes < max_unflushed_bytes:
        return None
    cause = "the upload is under way" if upload_pause is None else upload_pause.message
    return Pause(
        "unflushed_bytes",
        f"{unflushed_bytes} bytes are not in SSTs yet, max_unflushed_bytes is {max_unflushed_bytes}: {cause}",
    )


def plan_upload_pause(
    pressures: Iterable[L0Pressure], *, l0_max_ssts: int, l0_max_ssts_per_key: int
) -> Pause | None:
    """Why the SSTs of the next memtable must not be uploaded yet, or None if they may be.

    A memtable becomes one SST per segment, and all of them are committed together: every one of `pressures` must have
    room for one more. The limit per key counts only keys of the new SST: other keys get no more SSTs by it.
    """
    for pressure in pressures:
        where = f" of segment {pressure.segment!r}" if pressure.segment else ""
        ssts = len(pressure.live) + len(pressure.in_flight)
        if ssts >= l0_max_ssts:
            return Pause(
                "num_ssts",
                f"L0{where} has {ssts} SSTs, l0_max_ssts is {l0_max_ssts}: waiting for compaction",
            )
        depth = deepest_cover((*pressure.live, *pressure.in_flight), pressure.added)
        if depth >= l0_max_ssts_per_key:
            return Pause(
                "num_ssts_per_key",
                f"some key is in the range of {depth} SSTs of L0{where}, l0_max_ssts_per_key is "
                f"{l0_max_ssts_per_key}: waiting for compaction",
            )
    return None


def deepest_cover(ranges: Iterable[KeyRange], within: KeyRange) -> int:
    """The greatest number of `ranges` that contain one key of `within`."""
    edges: list[tuple[_Position, int]] = []
    for keys in ranges:
        cut = keys.intersect(within)
        if not cut.empty:
            edges.append(((0, b"") if cut.start is None else (1, cut.start), 1))
            edges.append(((2, b"") if cut.stop is None else (1, cut.stop), -1))
    deepest = depth = 0
    # Stops are exclusive, and -1 sorts before 1: a range that stops where another starts does not overlap it.
    for _, step in sorted(edges):
        depth += step
        deepest = max(deepest, depth)
    return deepest
