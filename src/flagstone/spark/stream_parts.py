"""What the tasks of a change stream are given, and the form in which they hand their rows to Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from flagstone.metadata.manifest import SsTable
from flagstone.spark.filters import Wanted
from flagstone.wal.changes import Change, Position
from flagstone.wal.load_marks import ToldLoad

_ROWS_PER_BATCH: Final = 16_384


@dataclass
class LogPartition(InputPartition):
    """Files of the log from `first` up to, not including, `stop`, of a micro-batch that begins at `begin`."""

    first: int
    stop: int
    begin: Position

    def __init__(self, first: int, stop: int, begin: Position) -> None:
        super().__init__(None)
        self.first, self.stop, self.begin = first, stop, begin


@dataclass
class LoadPartition(InputPartition):
    """One table of a bulk load."""

    load: ToldLoad
    table: SsTable

    def __init__(self, load: ToldLoad, table: SsTable) -> None:
        super().__init__(None)
        self.load, self.table = load, table


@dataclass
class SnapshotPartition(InputPartition):
    """Some keys of the database as the checkpoint shows it."""

    wanted: Wanted
    checkpoint: str

    def __init__(self, wanted: Wanted, checkpoint: str) -> None:
        super().__init__(None)
        self.wanted, self.checkpoint = wanted, checkpoint


def record_batches(changes: Iterable[Change], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The changes as Arrow, so many at a time."""
    for chunk in _chunks(changes, _ROWS_PER_BATCH):
        columns = zip(*chunk, strict=True)
        arrays = [pa.array(list(cells), field.type) for cells, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _chunks(changes: Iterable[Change], size: int) -> Iterator[list[Change]]:
    chunk: list[Change] = []
    for change in changes:
        chunk.append(change)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
