"""Errors between Spark and Flagstone: our own error in the text of a Spark error, and what a task raises."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from flagstone import errors
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.store.port import AccessRefused

_RAISED = re.compile(
    r"(flagstone(?:\.\w+)+)\.(\w+): (.+?)(?=\n\s*(?:at |JVM stacktrace|SQLSTATE|$)|\n\n|\Z)", re.DOTALL
)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(flagstone|obstore|cramjam|lz4|zstandard)\b")
_CHAINED = "The above exception was the direct cause of the following exception"
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
    missing = _MISSING.search(text)
    if missing is not None:
        return InvalidRequest(
            f"the Python that runs Spark's tasks has no module {missing[1]!r}: install flagstone there, ship it with "
            "the job, or let PYSPARK_PYTHON name a Python that has it (see docs/cluster.md)"
        )
    raised = list(_RAISED.finditer(text))
    # Where a traceback shows what an error was raised from, that comes first.
    found = None if not raised else raised[-1 if _CHAINED in text else 0]
    kind = None if found is None else _kind(found[1], found[2])
    if found is None or kind is None:
        return None
    message = found[3].strip()
    if kind is errors.Closed:
        return errors.Closed(message, reason="fenced" if "newer writer" in message else "failed")
    return kind(message)


@contextmanager
def in_task() -> Iterator[None]:
    """Has a store's refusal say that it met a task: the driver had been let in, or the task would not have begun."""
    try:
        yield
    except AccessRefused as refused:
        raise InvalidRequest(
            f"a task on {platform.node()} was not let into the store: {refused}. The driver was: give the executors "
            "the same credentials, in their environment, with a role, or as options `store.…` (see docs/cluster.md)"
        ) from refused


def _kind(module: str, name: str) -> type[FlagstoneError] | None:
    try:
        raised = getattr(import_module(module), name, None)
    except ImportError:
        return None
    if not isinstance(raised, type):
        return None
    return next((kind for kind in _SIX if issubclass(raised, kind)), None)
