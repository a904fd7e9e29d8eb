"""The data source of a bulk load: tasks build SSTs, the driver commits all of them with one manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from flagstone.spark.error_translation import in_task
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.heartbeat import confirm_plan
from flagstone.spark.load.plan import LoadPlan, MadeSst, write_report
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions

if TYPE_CHECKING:
    import pyarrow as pa


def begin(options: WriteOptions, *, owner: str = "") -> LoadPlan:
    """Begin the load that the options describe."""
    return begin_load(
        options.address,
        owner=owner,
        record_id=options.load_id,
        segment_extractor=options.load_segment_extractor(),
        only_if_new=options.only_if_new,
    )


@dataclass
class TaskSsts(WriterCommitMessage):
    """The SSTs that one task uploaded."""

    made: list[MadeSst]


class FlagstoneWriter(DataSourceArrowWriter):
    """A bulk load. Its driver commits, or gives the load up."""

    def __init__(self, plan: LoadPlan, options: WriteOptions, *, overwrite: bool) -> None:
        self._plan = plan
        self._options = options
        self._overwrite = overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskSsts:
        with in_task():
            return TaskSsts(write_ssts(iterator, confirm_plan(self._plan), self._options))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        report = commit_load(self._plan, self._options, _made(messages), replaces_all=self._overwrite)
        if self._options.receipt is not None:
            write_report(self._options.receipt, report)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - it deletes all SSTs
        abort_load(self._plan)


def _made(messages: list[WriterCommitMessage | None]) -> list[MadeSst]:
    return [made for message in messages if isinstance(message, TaskSsts) for made in message.made]
