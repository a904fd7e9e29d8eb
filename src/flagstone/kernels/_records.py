"""Records made without a call, numbers of 128 bits, and marked bytes: the interpreted form.

`_records.pxd` has the compiled form. A record is an object with slots, and a member the descriptor of one slot: setting
it does what `object.__setattr__` does in the `__init__` of a frozen dataclass, for a tenth of the price.
"""

from __future__ import annotations

from typing import Any, Final

MAX_SLOTS: Final = 32
_LOW_64: Final = 2**64 - 1


class Slots:
    """A number for each slot of a table."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: list[Any] = [0] * MAX_SLOTS


def new_slots() -> Slots:
    return Slots()


def new_record(kind: Any) -> Any:
    """An instance without values."""
    return object.__new__(kind)


def set_member(record: Any, member: Any, value: Any) -> None:
    member.__set__(record, value)


def get_member(record: Any, member: Any) -> Any:
    return member.__get__(record)


def finish_record(_record: Any) -> None:
    """The object is part of no cycle, whatever it gets: compiled, it is taken off the garbage collector's list.

    Otherwise each full collection visits every SST of the manifest.
    """


def wide_number(high: int, low: int) -> int:
    """A number of 128 bits from its halves."""
    return high << 64 | low


def wide_high(number: int) -> int:
    return number >> 64


def wide_low(number: int) -> int:
    return number & _LOW_64


def mark_bytes(marks: Any, start: int, stop: int) -> int:
    """Mark bytes as used; returns 0 if none of them was."""
    before = marks.count(0, start, stop) != stop - start
    marks[start:stop] = b"\1" * (stop - start)
    return before
