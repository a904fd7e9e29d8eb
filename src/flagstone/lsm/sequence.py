"""The history of sequence numbers and times in the manifest, bounded and compressed.

    u8 version = 1 | u32 LE count | gorilla(sequence numbers) | gorilla(seconds)

gorilla(list) is a bit stream, most significant bit first, padded with zeros to a whole byte: 32-bit count,
64-bit first value, then for each value the change of the difference to its predecessor:

    0 -> 0        -63..63 -> 10 + 7 bits        -255..255 -> 110 + 9 bits
    -2047..2047 -> 1110 + 12 bits               otherwise -> 1111 + 32 bits, two's complement

A change beyond 32 bits cannot be encoded. Sequence numbers can jump that far, so a tracker forgets the points before
such a jump. All arithmetic wraps at 64 bits, as SlateDB's does, so points that SlateDB stored are kept unchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from flagstone.errors import CorruptData, InternalError

MIN_INTERVAL_S: Final = 60
CAPACITY: Final = 8192

Rounding = Literal["down", "up"]

_VERSION: Final = 1
_HEADER_BYTES: Final = 5
_WRAP: Final = 2**64
_BRANCHES: Final = ((63, "10", 7), (255, "110", 9), (2047, "1110", 12))
_WIDTHS: Final = {1: 7, 2: 9, 3: 12, 4: 32}


@dataclass(frozen=True, slots=True)
class SequenceTracker:
    """Points (sequence number, Unix second), oldest first.

    `last_recorded_s` enforces the interval between points. It is not stored: the first point after opening is always
    accepted.
    """

    sequences: tuple[int, ...] = ()
    seconds: tuple[int, ...] = ()
    last_recorded_s: int | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.sequences)

    def record(self, sequence: int, second: int) -> SequenceTracker:
        """The tracker with this point; itself if the last point is less than a minute old.

        A point that is not after the last one, in sequence number and in time, is ignored: lookups rely on the order.
        """
        last = self.last_recorded_s
        if last is not None and second < last + MIN_INTERVAL_S:
            return self
        if self.sequences and (sequence <= self.sequences[-1] or second < self.seconds[-1]):
            return self
        points = _append(list(zip(self.sequences, self.seconds, strict=True)), (sequence, second))
        if len(points) > CAPACITY:
            thinned: list[tuple[int, int]] = []
            for point in points[::2]:
                thinned = _append(thinned, point)
            points = thinned
        return SequenceTracker(
            tuple(point[0] for point in points), tuple(point[1] for point in points), last_recorded_s=second
        )

    def extend(self, newer: SequenceTracker) -> SequenceTracker:
        """The tracker with the points of a newer one appended, each subject to the rules of `record`."""
        tracker = self
        for sequence, second in zip(newer.sequences, newer.seconds, strict=True):
            tracker = tracker.record(sequence, second)
        return tracker

    def time_of(self, sequence: int, rounding: Rounding = "down") -> int | None:
        """The second of the last point up to `sequence` (`up`: the first from it on), or None."""
        return _find(self.sequences, self.seconds, sequence, rounding)

    def sequence_at(self, second: int, rounding: Rounding = "down") -> int | None:
        """The sequence number of the last point up to `second` (`up`: the first from it on), or None."""
        return _find(self.seconds, self.sequences, second, rounding)


def _find(keys: Sequence[int], values: Sequence[int], key: int, rounding: Rounding) -> int | None:
    position = bisect_right(keys, key) - 1 if rounding == "down" else bisect_left(keys, key)
    return values[position] if 0 <= position < len(values) else None


def _append(points: list[tuple[int, int]], point: tuple[int, int]) -> list[tuple[int, int]]:
    """The points with one more; only the new one if the step to it is too large to encode."""
    before = [*points[-2:], point]
    for column in zip(*before, strict=True):
        if not _fits(_changes(column)[-1]):
            return [point]
    points.append(point)
    return points


def _changes(values: Sequence[int]) -> list[int]:
    """The delta of deltas of every value but the first; the delta before the first one is 0."""
    changes, last, last_delta = [], values[0], 0
    for value in values[1:]:
        delta = _signed(value - last, 64)
        changes.append(_signed(delta - last_delta, 64))
        last, last_delta = value, delta
    return changes or [0]


def _fits(change: int) -> bool:
    return -(2**31) <= change < 2**31


def _signed(value: int, bits: int) -> int:
    """The low `bits` of the value as a two's complement number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@lru_cache(maxsize=8)
def encode_tracker(tracker: SequenceTracker) -> bytes:
    """The stored bytes. Cached for a few trackers: most manifests have the tracker of the manifest before."""
    header = bytes([_VERSION]) + len(tracker).to_bytes(4, "little")
    return header + _pack(tracker.sequences) + _pack(tracker.seconds)


@lru_cache(maxsize=8)
def decode_tracker(data: bytes) -> SequenceTracker:
    """The tracker in `data`. Raises `CorruptData` unless `data` is exactly one tracker."""
    if len(data) < _HEADER_BYTES or data[0] != _VERSION:
        raise CorruptData("sequence tracker has an unknown version or is cut off", offset=0)
    count = int.from_bytes(data[1:_HEADER_BYTES], "little")
    sequences, middle = _unpack(data, _HEADER_BYTES)
    seconds, end = _unpack(data, middle)
    if len(sequences) != count or len(seconds) != count or end != len(data):
        raise CorruptData(
            f"sequence tracker of {len(data)} bytes announces {count} points, holds {len(sequences)} numbers "
            f"and {len(seconds)} times in {end} bytes",
            offset=1,
        )
    return SequenceTracker(
        tuple(value % _WRAP for value in sequences), tuple(_signed(value, 64) for value in seconds)
    )


def _pack(values: Sequence[int]) -> bytes:
    bits = [f"{len(values):032b}"]
    if values:
        bits.append(f"{values[0] % _WRAP:064b}")
        bits.extend(_pack_changes(_changes(values) if len(values) > 1 else ()))
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big")


def _pack_changes(changes: Iterable[int]) -> Iterable[str]:
    for change in changes:
        if change == 0:
            yield "0"
            continue
        for limit, prefix, width in _BRANCHES:
            if -limit <= change <= limit:
                yield f"{prefix}{change % (1 << width):0{width}b}"
                break
        else:
            if not _fits(change):
                raise InternalError(f"sequence tracker step {change} does not fit 32 bits")
            yield f"1111{change % 2**32:032b}"


def _unpack(data: bytes, start: int) -> tuple[list[int], int]:
    """The values of the list at `start`, and where it ends."""
    # A string of bits: slicing it is far cheaper than shifting one huge integer per value.
    stream = data[start:]
    bits = f"{int.from_bytes(stream, 'big'):0{8 * len(stream)}b}" if stream else ""
    if len(bits) < 32:
        raise CorruptData("sequence tracker is cut off", offset=start)
    count, at = int(bits[:32], 2), 32
    # Every value but the first takes at least one bit: an absurd count is refused before the loop.
    if count and len(bits) < 96 + count - 1:
        raise CorruptData(f"sequence tracker is cut off before its {count} values", offset=start)
    values: list[int] = []
    if count:
        value, delta, at = int(bits[32:96], 2), 0, 96
        values.append(value)
        while len(values) < count:
            ones = 0
            while ones < 4 and bits[at : at + 1] == "1":
                ones, at = ones + 1, at + 1
            if ones < 4:
                at += 1
            if ones:
                width = _WIDTHS[ones]
                if at + width > len(bits):
                    raise CorruptData("sequence tracker is cut off", offset=start + at // 8)
                delta += _signed(int(bits[at : at + width], 2), width)
                at += width
            value += delta
            values.append(value)
    if at > len(bits):
        raise CorruptData("sequence tracker is cut off", offset=start + at // 8)
    return values, start + (at + 7) // 8
