"""A merge operator that says how many operands it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flagstone.lsm.merge_operator import MergeOperator


class CountingOperator:
    """Another operator, with every operand counted. What else that one has (`finish`) it has too."""

    def __init__(self, counted: MergeOperator, count: Callable[[int], None]) -> None:
        self.counted = counted
        self._count = count
        many = getattr(counted, "merge_many", None)
        if many is not None:
            self.merge_many: Callable[[bytes, bytes | None, Sequence[bytes]], bytes] = (
                lambda key, base, operands: self._many(many, key, base, operands)
            )

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """See `MergeOperator.merge`."""
        self._count(1)
        return self.counted.merge(key, existing, operand)

    def _many(self, many: Any, key: bytes, base: bytes | None, operands: Sequence[bytes]) -> bytes:
        self._count(len(operands))
        folded: bytes = many(key, base, operands)
        return folded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("counted", "merge_many"):
            raise AttributeError(name)
        return getattr(self.counted, name)
