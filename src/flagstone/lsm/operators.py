"""Ready-made merge operators. Their encodings are stored in databases and never change."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flagstone.errors import InvalidRequest

_COUNTER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Counter:
    """Adds signed numbers: 8 bytes, little endian, two's complement (`Counter.encode`).

    Non-negative counts are encoded as in SlateDB's documentation. A sum beyond 64 bits takes more bytes. It does not
    wrap, which would be silent, and raises no error, which would depend on the order of folding.
    """

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """One operand, folded onto the value; see `MergeOperator`."""
        return self.merge_many(key, existing, [operand])

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:
        """Several operands, oldest first, folded at once."""
        total = 0 if existing is None else self._decode(key, existing)
        return self.encode(total + sum(self._decode(key, operand) for operand in operands))

    @staticmethod
    def encode(number: int) -> bytes:
        """The shortest encoding of at least 8 bytes."""
        size = (number if number >= 0 else ~number).bit_length() // 8 + 1
        return number.to_bytes(max(size, _COUNTER_BYTES), "little", signed=True)

    @staticmethod
    def decode(value: bytes) -> int:
        """The number of a stored value."""
        return int.from_bytes(value, "little", signed=True)

    def _decode(self, key: bytes, value: bytes) -> int:
        if len(value) < _COUNTER_BYTES:
            raise InvalidRequest(
                f"{value!r} at {key!r} is not a counter; write Counter.encode(n), 8 bytes little endian"
            )
        return self.decode(value)


@dataclass(frozen=True, slots=True)
class Concatenate:
    """Appends each operand to the value, with `separator` between them."""

    separator: bytes = b""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """One operand, folded onto the value; see `MergeOperator`."""
        return self.merge_many(key, existing, [operand])

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:  # noqa: ARG002
        """Several operands, oldest first, folded at once."""
        return self.separator.join(operands if existing is None else [existing, *operands])


@dataclass(frozen=True, slots=True)
class SetUnion:
    """Forms the union of sets: values and operands are sets (`SetUnion.encode`).

    A set is stored as its members in ascending order, each with its length (4 bytes, big endian) before its bytes.
    """

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """One operand, folded onto the value; see `MergeOperator`."""
        return self.merge_many(key, existing, [operand])

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:
        """Several operands, oldest first, folded at once."""
        members: set[bytes] = set()
        try:
            for part in operands if existing is None else (existing, *operands):
                members |= self.decode(part)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error} at {key!r}; write SetUnion.encode(members)") from None
        return self.encode(members)

    @staticmethod
    def encode(members: Iterable[bytes]) -> bytes:
        """The bytes of a set, as a value or an operand."""
        return b"".join(struct.pack(">I", len(member)) + member for member in sorted(set(members)))

    @staticmethod
    def decode(value: bytes) -> frozenset[bytes]:
        """The members. Raises `InvalidRequest` if the bytes are not a set."""
        members, at = set(), 0
        while at < len(value):
            end = at + 4 + int.from_bytes(value[at : at + 4], "big")
            if at + 4 > len(value) or end > len(value):
                raise InvalidRequest(f"{value!r} is not a set: it ends inside a member")
            members.add(value[at + 4 : end])
            at = end
        return frozenset(members)


@dataclass(frozen=True, slots=True)
class Maximum:
    """Keeps the greatest value, compared byte by byte. Encode numbers big endian and with one width."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:  # noqa: ARG002
        """One operand, folded onto the value; see `MergeOperator`."""
        return operand if existing is None else max(existing, operand)

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:
        """Several operands, oldest first, folded at once."""
        return self.merge(key, existing, max(operands))


@dataclass(frozen=True, slots=True)
class Minimum:
    """Keeps the smallest value, compared byte by byte. Encode numbers big endian and with one width."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:  # noqa: ARG002
        """One operand, folded onto the value; see `MergeOperator`."""
        return operand if existing is None else min(existing, operand)

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:
        """Several operands, oldest first, folded at once."""
        return self.merge(key, existing, min(operands))
