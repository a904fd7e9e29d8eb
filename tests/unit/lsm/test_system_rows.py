from __future__ import annotations

import pytest

from flagstone.lsm.system_rows import SYSTEM_PREFIX, SYSTEM_STOP, is_system, visible_ranges
from flagstone.types import KeyRange

KEYS = [
    b"\x00", b"\x00flagstone", b"\x00flagstone.", SYSTEM_PREFIX, b"\x00flagstone/schema/", b"\x00flagstone/\xff",
    SYSTEM_STOP, b"\x00g", b"\x01", b"a",
]  # fmt: skip


@pytest.mark.parametrize("start", [None, *KEYS])
@pytest.mark.parametrize("stop", [None, *KEYS])
def test_visible_ranges_are_a_range_without_the_keys_of_system_rows(
    start: bytes | None, stop: bytes | None
) -> None:
    keys = KeyRange(start, stop)
    parts = visible_ranges(keys)

    shown = [key for key in KEYS if any(key in part for part in parts)]
    assert shown == [key for key in KEYS if key in keys and not is_system(key)]
    assert not any(part.empty for part in parts)
    assert list(parts) == sorted(parts, key=lambda part: part.start or b"")
