"""The type of `Resident`, the compiled base class of `Sst`.

A Cython decorator hides the kernel's class from type checkers, so its methods are declared here. At run time `Resident`
is the kernel's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flagstone.errors import CorruptData
from flagstone.format.sst import BlockIndex
from flagstone.kernels import probe
from flagstone.types import EntryTuple

__all__ = ["Resident"]

if TYPE_CHECKING:

    class Resident:
        """The parts of one SST that are in memory. The signatures are those of `kernels/_probe.py`."""

        def __init__(
            self,
            may_contain: Callable[..., Any],
            find_row: Callable[[bytes, bytes, int], Any],
            find_versions: Callable[[bytes, bytes, int], list[EntryTuple]],
        ) -> None: ...
        def hold_meta(self, index: BlockIndex, first_keys: list[bytes], bloom: bytes | None) -> None: ...
        def release_meta(self) -> None: ...
        def held_index(self) -> BlockIndex | None: ...
        def hold_block(self, number: int, raw: bytes, count: int) -> None: ...
        def release_block(self, number: int) -> bytes | None: ...
        def holds(self, number: int) -> bool: ...
        def held_numbers(self) -> list[int]: ...
        def held_block(self, number: int) -> bytes | None: ...
        def held_blocks(self, start: int, stop: int) -> list[bytes]: ...
        def take_touch(self, number: int) -> bool: ...
        def take_counts(self) -> tuple[int, int, int, int, int]: ...
        def damaged(self, number: int, error: CorruptData) -> CorruptData: ...

else:
    Resident = probe.Resident
