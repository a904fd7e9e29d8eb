"""What the shell learns from a failure, by kind of error."""

from __future__ import annotations

from typing import Final

from flagstone.errors import (
    Closed,
    CorruptData,
    FlagstoneError,
    InvalidRequest,
    TransactionConflict,
    Unavailable,
)

ABSENT: Final = 1
UNAVAILABLE: Final = 5
DAMAGE: Final = 6
INTERNAL: Final = 70
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""The last two are what a shell reports for a program that SIGINT or SIGPIPE ended."""

_BY_KIND: Final[tuple[tuple[type[FlagstoneError], int], ...]] = (
    (InvalidRequest, 2),
    (TransactionConflict, 3),
    (Closed, 4),
    (Unavailable, UNAVAILABLE),
    (CorruptData, DAMAGE),
)


def exit_code(error: FlagstoneError) -> int:
    """The exit code of an error's kind; 70 (EX_SOFTWARE) for what should never happen."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), INTERNAL)
