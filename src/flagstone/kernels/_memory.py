"""Memory that grows without the interpreter's lock: the interpreted form. `_memory.pxd` has the compiled form.

Compiled, memory is taken from C, and `data` is NULL where there was none. The owner must free it.
"""

from __future__ import annotations


class Buffer:
    """Bytes: `used` of `room` are in use."""

    __slots__ = ("data", "room", "used")

    def __init__(self, room: int) -> None:
        self.data = bytearray(room)
        self.used = 0
        self.room = room


class Numbers:
    """Unsigned 64-bit numbers: `used` of `room` are in use."""

    __slots__ = ("data", "room", "used")

    def __init__(self, room: int) -> None:
        self.data = [0] * room
        self.used = 0
        self.room = room


def new_buffer(room: int) -> Buffer:
    return Buffer(room)


def new_numbers(room: int) -> Numbers:
    return Numbers(room)


def grow_buffer(buffer: Buffer, room: int) -> bool:
    """Enlarge the memory to `room` bytes; False when there is none, then the old memory stays."""
    buffer.data.extend(bytes(room - buffer.room))
    buffer.room = room
    return True


def grow_numbers(numbers: Numbers, room: int) -> bool:
    """Enlarge the memory to `room` numbers, like `grow_buffer`."""
    numbers.data.extend([0] * (room - numbers.room))
    numbers.room = room
    return True


def free_buffer(buffer: Buffer) -> None:
    """Give the memory back."""
    buffer.data = bytearray()


def free_numbers(numbers: Numbers) -> None:
    """Give the memory back."""
    numbers.data = []
