"""The parts of a micro-batch: what one task reads. They travel from the driver to the tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from flagstone.loads.edit import VisibleLoad
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import SsTable
from flagstone.spark.selection import Wanted
from flagstone.spark.stream.former import BaseState


class Versions(NamedTuple):
    """Which versions name the schemas of the rows in a micro-batch, and of the state before it; see `offsets`."""

    now: int | None = None
    before: int | None = None


NO_VERSIONS: Final = Versions()


class StreamPartition(InputPartition):
    """A part of a micro-batch."""

    versions: Versions = NO_VERSIONS


@dataclass
class WalPartition(StreamPartition):
    """WAL files from `first` up to, not including, `stop`, of a micro-batch that begins at `begin`."""

    first: int
    stop: int
    begin: Position
    base: BaseState | None

    def __init__(self, first: int, stop: int, begin: Position, base: BaseState | None) -> None:
        super().__init__(None)
        self.first, self.stop, self.begin, self.base = first, stop, begin, base


@dataclass
class LoadPartition(StreamPartition):
    """One SST of a bulk load that comes before WAL file `next_id`."""

    load: VisibleLoad
    sst: SsTable
    next_id: int
    base: BaseState | None

    def __init__(self, load: VisibleLoad, sst: SsTable, next_id: int, base: BaseState | None) -> None:
        super().__init__(None)
        self.load, self.sst, self.next_id, self.base = load, sst, next_id, base


@dataclass
class RangeDeletePartition(StreamPartition):
    """A range delete, which has no SST."""

    load: VisibleLoad

    def __init__(self, load: VisibleLoad) -> None:
        super().__init__(None)
        self.load = load


@dataclass
class SnapshotPartition(StreamPartition):
    """A key range of the database at the checkpoint."""

    wanted: Wanted
    checkpoint: str

    def __init__(self, wanted: Wanted, checkpoint: str) -> None:
        super().__init__(None)
        self.wanted, self.checkpoint = wanted, checkpoint


@dataclass
class ReplacePartition(StreamPartition):
    """A key range: what went between the state before WAL file `next_id` and the checkpoint, and what came."""

    wanted: Wanted
    checkpoint: str
    seq: int
    next_id: int
    base: BaseState

    def __init__(self, wanted: Wanted, checkpoint: str, seq: int, next_id: int, base: BaseState) -> None:
        super().__init__(None)
        self.wanted, self.checkpoint, self.seq, self.next_id, self.base = (
            wanted,
            checkpoint,
            seq,
            next_id,
            base,
        )


@dataclass
class MarkerPartition(StreamPartition):
    """One row, which says that everything before it is to be forgotten."""

    seq: int

    def __init__(self, seq: int) -> None:
        super().__init__(None)
        self.seq = seq
