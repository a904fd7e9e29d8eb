"""`count`: the exact number of rows, from what is known of SSTs where that is enough, otherwise by reading keys.

The statistics of an SST count its entries, and do not say how many of them are old versions of a key, or expire: they
are a bound, not a number of rows. But an SST never changes. So the first count of an SST reads it, in a task, and this
process remembers the result; a later count of a single sorted run reads only the manifest.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException

from flagstone.compaction.inputs import Part
from flagstone.errors import InternalError
from flagstone.read.scan_cursor import ScanRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import ulid_text
from flagstone.runtime.sync import Lock
from flagstone.spark.address import open_store
from flagstone.spark.error_translation import find_cause, in_task
from flagstone.spark.frames.checkpoints import kept
from flagstone.spark.frames.map_arrow import mapped
from flagstone.spark.frames.plan import ReadArguments, ReadPlan, plan_read
from flagstone.spark.frames.read import read
from flagstone.spark.held_state import CheckpointRead, explained
from flagstone.spark.job_control import described, parallelism
from flagstone.spark.jobs.verification import plan_shares
from flagstone.spark.scan import FlagstoneReader, scan_single_source, single_source
from flagstone.types import MAX_SEQ

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAX_FACTS: Final = 100_000
_TASKS_PER_SLOT: Final = 4


class Fact(NamedTuple):
    """What one SST, or a key range of it, holds: its rows, and when the first of them expires (None: none does)."""

    rows: int
    first_expiry_ms: int | None


class Facts:
    """What this process has learned about SSTs, which never change. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[tuple[Any, ...], Fact] = OrderedDict()

    def find(self, part: Part) -> Fact | None:
        """What is known of the part."""
        with self._lock:
            return self._known.get(_name(part))

    def forget(self) -> None:
        """Forget everything, as at the start of the process."""
        with self._lock:
            self._known.clear()

    def learn(self, part: Part, fact: Fact) -> None:
        """Remember it; the oldest facts are forgotten if there are too many."""
        with self._lock:
            self._known[_name(part)] = fact
            while len(self._known) > _MAX_FACTS:
                self._known.popitem(last=False)


FACTS: Final = Facts()
"""Those of this process."""


def count(spark: SparkSession, url: str | os.PathLike[str], **arguments: Unpack[ReadArguments]) -> int:
    """The number of rows that `read` with the same arguments returns.

    If a single sorted run covers the keys, and nothing is only in the WAL, each of its SSTs is read once; this process
    remembers its number of rows. Otherwise tasks read all keys, and return only numbers.

    Raises:
        InvalidRequest: an argument is wrong, or there is no such database.
        Unavailable: the store did not answer.

    """
    given: Any = {**arguments, "columns": ["seq"]}  # the column that costs least
    if str(arguments.get("mode") or "PERMISSIVE").upper() != "PERMISSIVE":
        given["columns"] = arguments.get("columns")  # a row counts if the columns of the read decode
    plan = plan_read(url, given, spark=spark)
    if not plan.complete:
        return int(read(spark, url, **given).count())
    quick = _from_facts(plan)
    if quick is not None:
        return quick
    held = plan.hold()
    owned = plan.options.checkpoint is None
    try:
        with kept(held, owned=owned), described(spark, f"count {held.options.address.name}"):
            return _count_run(spark, plan, held) if _can_learn(plan) else _count_rows(spark, plan, held)
    except PySparkException as error:
        raise find_cause(str(error)) or InternalError(f"a Spark task failed: {error}") from error


def _can_learn(plan: ReadPlan) -> bool:
    """Whether the result may be remembered. Former states and merges are counted each time."""
    options = plan.options
    decodes = plan.shape.mapping is not None and options.malformed.mode != "PERMISSIVE"
    return options.as_of is None and options.merge_operator is None and not decodes


def _sources(plan: ReadPlan, held: CheckpointRead) -> list[Part] | None:
    """The parts of the single source that has all the rows; None if there is none, or a key is in two of its SSTs."""
    reader = FlagstoneReader(held, plan.schema)
    wanted = reader.whole_ranges()
    if wanted is None:
        return None
    with held.open() as opened:
        if opened.status()["memtable_bytes"]:
            return None
        manifest = opened.manifest()
    _, paths = open_store(held.options.address)
    found = [single_source(manifest, keys, paths) for keys in wanted]
    parts = [part for each in found for part in each or ()]
    if None in found or any(_overlap(one, two) for one, two in pairwise(parts)):
        return None
    return parts


def _overlap(one: Part, two: Part) -> bool:
    return one.keys.stop is None or two.keys.start is None or two.keys.start < one.keys.stop


def _from_facts(plan: ReadPlan) -> int | None:
    """The number of rows from what is known already; writes nothing. None if something must be read."""
    if not _can_learn(plan):
        return None
    held = replace(plan, options=replace(plan.options, snapshot="latest")).hold()
    parts = _sources(plan, held)
    return None if parts is None else _total(parts, include_expired=held.options.include_expired)


def _total(parts: Sequence[Part], *, include_expired: bool) -> int | None:
    now_ms, total = SYSTEM_CLOCK.now_ms(), 0
    for part in parts:
        fact = FACTS.find(part)
        if fact is None:
            return None
        if not include_expired and fact.first_expiry_ms is not None and fact.first_expiry_ms <= now_ms:
            return None
        total += fact.rows
    return total


def _count_run(spark: SparkSession, plan: ReadPlan, held: CheckpointRead) -> int:
    """Learn what is not known of the SSTs of a single source, and count; or count the rows of several sources."""
    parts = _sources(plan, held)
    if parts is None:
        return _count_rows(spark, plan, held)
    unknown = [part for part in parts if FACTS.find(part) is None]
    if unknown:
        sizes = [part.sst.info.estimated_size for part in unknown]
        shares = plan_shares(sizes, _TASKS_PER_SLOT * parallelism(spark))
        work: Any = _LearnTask(held, [[unknown[at] for at in share] for share in shares])
        shape = "share long, at long, rows long, expiry long"
        frame = spark.range(0, len(shares), 1, len(shares)).mapInArrow(work, shape)
        for row in frame.collect():
            FACTS.learn(unknown[shares[row.share][row.at]], Fact(row.rows, row.expiry))
    total = _total(parts, include_expired=held.options.include_expired)
    return _count_rows(spark, plan, held) if total is None else total


def _count_rows(spark: SparkSession, plan: ReadPlan, held: CheckpointRead) -> int:
    return sum(row.rows for row in mapped(spark, plan, held, _numbers, "rows long").collect())


def _numbers(batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    total = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"rows": pa.array([total], pa.int64())})


@dataclass(frozen=True)
class _LearnTask:
    """The work of a task: it gets the index of its share, and reads the SSTs in it."""

    held: CheckpointRead
    shares: list[list[Part]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for share in batch.column(0).to_pylist():
                with in_task(), explained(self.held):
                    facts = [learned(self.held, part) for part in self.shares[share]]
                expiries = [fact.first_expiry_ms for fact in facts]
                yield pa.RecordBatch.from_pydict(
                    {
                        "share": pa.array([share] * len(facts), pa.int64()),
                        "at": pa.array(range(len(facts)), pa.int64()),
                        "rows": pa.array([fact.rows for fact in facts], pa.int64()),
                        "expiry": pa.array(expiries, pa.int64()),
                    }
                )


def learned(held: CheckpointRead, part: Part) -> Fact:
    """Count the rows of one part, expired ones included."""
    store, _ = open_store(held.options.address)
    # An SST in the manifest has no row that a read of the newest state must not see.
    request = ScanRequest(
        keys=part.keys, max_seq=MAX_SEQ, now_ms=0, include_expired=True, merge_operator=None, whole_rows=True
    )
    rows, first = 0, None
    for batch in scan_single_source(store, [part], request, ("expires_ms",)):
        rows += batch.num_rows
        least = pc.min(batch.column(0)).as_py()
        if least is not None:
            first = least if first is None else min(first, least)
    return Fact(rows, first)


def _name(part: Part) -> tuple[Any, ...]:
    return part.path, ulid_text(part.sst.id), part.keys.start, part.keys.stop
