r"""System rows: rows that Flagstone itself keeps in a database, beside those of the application. Pure.

Their keys begin with `\0flagstone/`. The progress of a stream and the schema of structured rows are system rows: the
commit that writes the rows of the application also writes them, so the database has both or neither.

Scans, counts, exports and change feeds hide system rows unless the caller asks for them. A read of one key shows
every row. The rule is here and in no other module: `visible_ranges` for scans, `is_system` for rows one by one.
"""

from __future__ import annotations

from typing import Final

from flagstone.types import KeyRange

SYSTEM_PREFIX: Final = b"\x00flagstone/"
"""Keys with this prefix belong to system rows."""

SYSTEM_KEYS: Final = KeyRange.of_prefix(SYSTEM_PREFIX)

STREAM_PREFIX: Final = SYSTEM_PREFIX + b"stream/"
"""The keys of progress rows of streams."""

SCHEMA_PREFIX: Final = SYSTEM_PREFIX + b"schema/"
"""The keys of schema rows."""

SYSTEM_START: Final = SYSTEM_PREFIX
SYSTEM_STOP: Final = SYSTEM_KEYS.stop or b""


def is_system(key: bytes) -> bool:
    """Whether the key is that of a system row."""
    return key.startswith(SYSTEM_PREFIX)


def visible_ranges(keys: KeyRange) -> tuple[KeyRange, ...]:
    """The parts of a range without the keys of system rows, in ascending order; none if nothing is left."""
    start, stop = keys.start, keys.stop
    if (start is not None and start >= SYSTEM_STOP) or (stop is not None and stop <= SYSTEM_START):
        return () if keys.empty else (keys,)
    parts = (KeyRange(start, SYSTEM_START), KeyRange(SYSTEM_STOP, stop))
    return tuple(part for part in parts if not part.empty)
