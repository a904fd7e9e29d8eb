"""Errors between Spark and Flagstone: our own error in the text of a Spark error, and what a task raises."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from flagstone import errors
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.spark.worker_process import settle
from flagstone.store.port import AccessRefused

_RAISED = re.compile(
    r"(flagstone(?:\.\w+)+)\.(\w+): (.+?)(?=\n\s*(?:at |JVM stacktrace|SQLSTATE|$)|\n\n|\Z)", re.DOTALL
)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(flagstone|obstore|cramjam|lz4|zstandard)\b")
_CHAINED = "The above exception was the direct cause of the following exception"
_ERROR_KINDS = (
    errors.TransactionConflict,
    errors.Closed,
    errors.Unavailable,
    errors.InvalidRequest,
    errors.CorruptData,
    errors.InternalError,
)


def find_cause(text: str) -> FlagstoneError | None:
    """Our own error in the text of a Spark error, as one of the six error kinds; None if it contains none."""
    missing = _MISSING.search(text)
    if missing is not None:
        return InvalidRequest(
            f"the Python that runs Spark's tasks has no module {missing[1]!r}: install flagstone there, ship it with "
            "the job, or set PYSPARK_PYTHON to a Python that has it (see docs/cluster.md)"
        )
    raised = list(_RAISED.finditer(text))
    # In a traceback of chained errors the cause comes first, and the error that was raised comes last.
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
    """Translate a refusal of the store in a task: the driver has access, because it contacted the store before."""
    settle()
    try:
        yield
    except AccessRefused as refused:
        raise InvalidRequest(
            f"a task on {platform.node()} has no access to the store: {refused}. The driver has: give the executors "
            "the same credentials, in their environment, with a role, or as options `store.…` (see docs/cluster.md)"
        ) from refused


def _kind(module: str, name: str) -> type[FlagstoneError] | None:
    try:
        raised = getattr(import_module(module), name, None)
    except ImportError:
        return None
    if not isinstance(raised, type):
        return None
    return next((kind for kind in _ERROR_KINDS if issubclass(raised, kind)), None)
