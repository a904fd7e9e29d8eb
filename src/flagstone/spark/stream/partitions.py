"""The parts of a micro-batch: what one task reads. They travel from the driver to the tasks."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from flagstone.loads.edit import VisibleLoad
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import SsTable
from flagstone.spark.filters import Wanted


@dataclass
class WalPartition(InputPartition):
    """WAL files from `first` up to, not including, `stop`, of a micro-batch that begins at `begin`."""

    first: int
    stop: int
    begin: Position

    def __init__(self, first: int, stop: int, begin: Position) -> None:
        super().__init__(None)
        self.first, self.stop, self.begin = first, stop, begin


@dataclass
class LoadPartition(InputPartition):
    """One SST of a bulk load."""

    load: VisibleLoad
    sst: SsTable

    def __init__(self, load: VisibleLoad, sst: SsTable) -> None:
        super().__init__(None)
        self.load, self.sst = load, sst


@dataclass
class SnapshotPartition(InputPartition):
    """A key range of the database at the checkpoint."""

    wanted: Wanted
    checkpoint: str

    def __init__(self, wanted: Wanted, checkpoint: str) -> None:
        super().__init__(None)
        self.wanted, self.checkpoint = wanted, checkpoint
