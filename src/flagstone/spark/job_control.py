"""What people see of the work: what a job in Spark's pages is about, and at the end how much it was and how fast."""

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
    """Spark jobs that this thread starts within show `text`, with our name before it.

    A session of Spark Connect has no descriptions; its operations carry the text as a tag.
    """
    told = f"flagstone: {text}"
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        tag = told.replace(",", ";")  # a comma would end it
        spark.addTag(tag)
        try:
            yield
        finally:
            spark.removeTag(tag)
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setJobDescription(told)
    try:
        yield
    finally:
        # Where Spark has ended meanwhile, there is nothing to restore and what ended it must not be hidden.
        if not session_ended(spark):
            context.setLocalProperty(_DESCRIPTION, before)


def tag_thread(spark: SparkSession, tag: str) -> None:
    """Let jobs that this thread starts from now on be ended by `cancel_tagged`, from any thread."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        spark.addTag(tag)
        return
    # Not the session's own tags: without Spark Connect only the thread that set them can interrupt them.
    context.addJobTag(tag)
    context.setInterruptOnCancel(True)


def cancel_tagged(spark: SparkSession, tag: str) -> None:
    """End the jobs of that tag that run now; their tasks are interrupted. Later ones are not concerned."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        spark.interruptTag(tag)
    else:
        context.cancelJobsWithTag(tag)


def session_ended(spark: SparkSession) -> bool:
    """Whether the session's Spark is gone: stopped, or its process died. Of Spark Connect this is never known."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        return False
    if context._jsc is None:  # noqa: SLF001 - what `stop` leaves behind
        return True
    try:
        return bool(context._jsc.sc().isStopped())  # noqa: SLF001 - there is no other way to ask
    except Exception:  # noqa: BLE001 - nobody answers any more
        return True


def per_second(amount: float, seconds: float) -> float:
    """A rate that is finite, however short it took."""
    return amount / max(seconds, 1e-3)


def log_done(event: str, *, seconds: float, rows: int | None = None, bytes: int, **more: object) -> None:  # noqa: A002
    """One line at the end of the work; `bytes` is what the rate is about."""
    words = [f"{name}={value}" for name, value in more.items()]
    if rows is not None:
        words += [f"rows={rows}", f"rows_per_s={per_second(rows, seconds):.0f}"]
    words += [f"bytes={bytes}", f"seconds={seconds:.2f}", f"mb_per_s={per_second(bytes / 1e6, seconds):.1f}"]
    _log.info("%s %s", event, " ".join(words))


_UNKNOWN: Final = 8


def parallelism(spark: Any) -> int:
    """How many tasks Spark runs at once, where it says so; a session of Spark Connect does not."""
    context = getattr(spark, "_sc", None)
    return _UNKNOWN if context is None else max(1, int(context.defaultParallelism))
