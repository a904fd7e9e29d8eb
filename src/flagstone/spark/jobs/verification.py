"""Verification on Spark: tasks read the SSTs and WAL files from the store and check them.

The driver reads the manifests, lists the objects to check, and checks the references between them. It is the code of
`Admin.verify` with another `Checker`.
"""

from __future__ import annotations

import heapq
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from flagstone.errors import InternalError
from flagstone.spark.address import DatabaseAddress, open_store, open_wal_store, shared_address
from flagstone.spark.error_translation import find_cause
from flagstone.spark.job_control import described, log_done, parallelism
from flagstone.store.remote_options import OptionValue
from flagstone.verification.report import Report
from flagstone.verification.ssts import LocalChecker, SstCheck, Subject

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_TASKS_PER_SLOT: Final = 4
"""More tasks than run at once, so that one slow object at the end does not leave the other slots idle."""

_OBJECT_COST: Final = 64 * 1024
"""The cost of a request, as bytes that could be checked in the same time: many small files are work as well."""


def verify(
    spark: SparkSession,
    url: str | os.PathLike[str],
    *,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: str | None = None,
    tasks: int | None = None,
) -> Report:
    """Read every object, check every checksum, filter, order and reference, and report what is wrong.

    Returns the same report as `Admin.verify`. At most `tasks` tasks of Spark check the SSTs and the WAL. Writes
    nothing, and may run beside a writer.

    Raises:
        InvalidRequest: there is no database at that address.
        Unavailable: the store did not answer, to the driver or to a task.

    """
    address = shared_address(url, store=store, store_options=store_options, wal_store=wal_store)
    report = address.admin().verify(checker=SparkChecker(spark, address, tasks=tasks))
    log_done(
        "verified",
        database=address.name,
        ok=report.ok,
        findings=len(report.findings),
        objects=report.objects.total(),
        rows=report.rows,
        bytes=report.bytes,
        seconds=report.seconds,
    )
    return report


class SparkChecker:
    """A `Checker` (`verification.ssts`) that runs one Spark job, with a share of the objects per task."""

    def __init__(self, spark: SparkSession, address: DatabaseAddress, *, tasks: int | None = None) -> None:
        self._spark = spark
        self._address = address
        self._tasks = tasks or _TASKS_PER_SLOT * parallelism(spark)

    def check(self, subjects: Sequence[Subject]) -> list[SstCheck | None]:
        """See `Checker`."""
        if not subjects:
            return []
        shares = plan_shares([subject.bytes for subject in subjects], self._tasks)
        work = _CheckShare(self._address, [[subjects[at] for at in share] for share in shares])
        megabytes = sum(subject.bytes for subject in subjects) / 1e6
        count = len(shares)
        about = f"verify {self._address.name}, {len(subjects)} objects, {megabytes:.0f} MB"
        try:
            with described(self._spark, about):
                rows = (
                    self._spark.range(0, count, 1, count)
                    .mapInArrow(work, "share long, checks binary")
                    .collect()
                )
        except PySparkException as error:
            raise find_cause(str(error)) or InternalError(f"a Spark task failed: {error}") from error
        found: dict[int, SstCheck | None] = {}
        for row in rows:
            checks = pickle.loads(bytes(row.checks))  # noqa: S301 - made by our own task
            found.update(zip(shares[row.share], checks, strict=True))
        return [found[at] for at in range(len(subjects))]


@dataclass(frozen=True)
class _CheckShare:
    """The work of a task: it gets the index of its share, and checks the objects in it."""

    address: DatabaseAddress
    shares: list[list[Subject]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - needed only in the task

        store, _ = open_store(self.address)
        checker = LocalChecker(store, open_wal_store(self.address, store))
        for batch in batches:
            for share in batch.column(0).to_pylist():
                checks = pickle.dumps(list(checker.check(self.shares[share])))
                yield pa.RecordBatch.from_pydict(
                    {"share": pa.array([share], pa.int64()), "checks": pa.array([checks], pa.binary())}
                )


def plan_shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The positions of the sizes, in at most `count` shares of about equal work; none is empty. Pure."""
    shares: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    costs = [(0, share) for share in range(len(shares))]
    # Each object, the largest first, goes to the share with the least work: never worse than 4/3 of the optimum.
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        cost, share = heapq.heappop(costs)
        shares[share].append(at)
        heapq.heappush(costs, (cost + sizes[at] + _OBJECT_COST, share))
    return shares
