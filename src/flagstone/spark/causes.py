"""Our own errors, found again in what Spark makes of them: a text with the traceback of another process."""

from __future__ import annotations

import re
from importlib import import_module

from flagstone import errors
from flagstone.errors import FlagstoneError

_RAISED = re.compile(
    r"(flagstone(?:\.\w+)+)\.(\w+): (.+?)(?=\n\s*(?:at |JVM stacktrace|SQLSTATE|$)|\n\n|\Z)", re.DOTALL
)
_SIX = (
    errors.TransactionConflict,
    errors.Closed,
    errors.Unavailable,
    errors.InvalidRequest,
    errors.CorruptData,
    errors.InternalError,
)


def find_cause(text: str) -> FlagstoneError | None:
    """Our own error in what Spark says about a failed job, where there is one: as one of the six kinds."""
    found = _RAISED.search(text)
    kind = None if found is None else _kind(found[1], found[2])
    if found is None or kind is None:
        return None
    message = found[3].strip()
    if kind is errors.Closed:
        return errors.Closed(message, reason="fenced" if "newer writer" in message else "failed")
    return kind(message)


def _kind(module: str, name: str) -> type[FlagstoneError] | None:
    try:
        raised = getattr(import_module(module), name, None)
    except ImportError:
        return None
    if not isinstance(raised, type):
        return None
    return next((kind for kind in _SIX if issubclass(raised, kind)), None)
