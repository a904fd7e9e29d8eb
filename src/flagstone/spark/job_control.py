"""Spark jobs: their descriptions and tags, how many tasks run at once, and the summary that is logged at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("flagstone.spark")

_DESCRIPTION: Final = "spark.job.description"


@contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Describe the Spark jobs that this thread starts inside the context as `flagstone: <text>`.

    A session of Spark Connect has no descriptions; its operations get the text as a tag.
    """
    description = f"flagstone: {text}"
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        tag = description.replace(",", ";")  # a tag must not contain a comma
        spark.addTag(tag)
        try:
            yield
        finally:
            spark.removeTag(tag)
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setJobDescription(description)
    try:
        yield
    finally:
        # If Spark has ended, restoring would fail and hide the error that ended it.
        if not session_ended(spark):
            context.setLocalProperty(_DESCRIPTION, before)


def tag_thread(spark: SparkSession, tag: str) -> None:
    """Tag the jobs that this thread starts from now on, so that any thread can end them with `cancel_tagged`."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        spark.addTag(tag)
        return
    # Not `spark.addTag`: without Spark Connect only the thread that added such a tag can interrupt it.
    context.addJobTag(tag)
    context.setInterruptOnCancel(True)


def cancel_tagged(spark: SparkSession, tag: str) -> None:
    """End the running jobs with that tag and interrupt their tasks. Jobs that start later are not affected."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        spark.interruptTag(tag)
    else:
        context.cancelJobsWithTag(tag)


def session_ended(spark: SparkSession) -> bool:
    """Whether Spark was stopped or its process died. Always False for Spark Connect, where this is unknown."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        return False
    if context._jsc is None:  # noqa: SLF001 - `stop` sets it to None
        return True
    try:
        return bool(context._jsc.sc().isStopped())  # noqa: SLF001 - PySpark has no method for this
    except Exception:  # noqa: BLE001 - the Java process does not answer
        return True


def per_second(amount: float, seconds: float) -> float:
    """The rate; finite even for zero seconds."""
    return amount / max(seconds, 1e-3)


def log_done(event: str, *, seconds: float, rows: int | None = None, bytes: int, **more: object) -> None:  # noqa: A002
    """Log one line at the end of a job. The rate is computed from `bytes`."""
    words = [f"{name}={value}" for name, value in more.items()]
    if rows is not None:
        words += [f"rows={rows}", f"rows_per_s={per_second(rows, seconds):.0f}"]
    words += [f"bytes={bytes}", f"seconds={seconds:.2f}", f"mb_per_s={per_second(bytes / 1e6, seconds):.1f}"]
    _log.info("%s %s", event, " ".join(words))


_DEFAULT_PARALLELISM: Final = 8
"""The assumption for Spark Connect, which does not report its number of cores."""


def parallelism(spark: Any) -> int:
    """How many tasks Spark runs at once."""
    context = getattr(spark, "_sc", None)
    return _DEFAULT_PARALLELISM if context is None else max(1, int(context.defaultParallelism))
