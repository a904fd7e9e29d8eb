"""The metrics of an open database that are computed on request, under SlateDB's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime import metric_names as names
from flagstone.runtime.clock import Clock
from flagstone.runtime.metrics import Metric, Metrics
from flagstone.runtime.operations import Operation
from flagstone.store.cost import USAGE_NAMES, Usage, plan_cost

if TYPE_CHECKING:
    from flagstone.db.writer.engine import Engine


class RequestReport:
    """The counts of reads, the shape of the tree, and what the requests cost."""

    def __init__(self, metrics: Metrics, *, clock: Clock, price_list: str) -> None:
        self._metrics = metrics
        self._clock = clock
        self._price_list = price_list
        self._opened_at = clock.monotonic()
        self._uptime = metrics.gauge(names.DB_UPTIME_SECONDS)
        self._gets = metrics.counter(names.DB_REQUEST_COUNT, op="get")
        self._scans = metrics.counter(names.DB_REQUEST_COUNT, op="scan")
        self._gauges = {
            name: metrics.gauge(name)
            for name in (
                names.DB_L0_SST_COUNT,
                names.DB_SEGMENT_MAX_L0_SST_COUNT,
                names.DB_SORTED_RUN_COUNT,
                names.DB_SST_VIEW_COUNT,
                names.DB_SST_COUNT,
                names.DB_EXTERNAL_DB_COUNT,
                names.DB_MANIFEST_ID,
                names.DB_LAST_L0_SEQ,
                names.DB_LIVE_BYTES,
                names.DB_CHECKPOINT_COUNT,
                names.DB_WRITER_EPOCH,
            )
        }

    def update_reads(self, *, gets: int, scans: int) -> None:
        """Set the number of reads since the database was opened."""
        self._gets.raise_to(gets)
        self._scans.raise_to(scans)
        self._uptime.set(self._clock.monotonic() - self._opened_at)

    def cost(self) -> dict[str, Any]:
        """What the database has cost since it was opened. Update the metrics first."""
        return plan_cost(Usage.of(self._metrics.named(*USAGE_NAMES)), self._price_list).to_dict()

    def update_shape(self, latest: Versioned[Manifest]) -> None:
        """Set the gauges that describe this manifest."""
        self._gauges[names.DB_MANIFEST_ID].set(latest.id)
        for name, value in plan_shape(latest.value).items():
            self._gauges[name].set(value)


def plan_shape(manifest: Manifest) -> dict[str, int]:
    """The gauges that describe a manifest."""
    trees = tuple(manifest.trees)
    views = [view for tree in trees for view in tree.l0]
    views += [view for tree in trees for run in tree.runs for view in run.views]
    return {
        names.DB_L0_SST_COUNT: sum(len(tree.l0) for tree in trees),
        names.DB_SEGMENT_MAX_L0_SST_COUNT: max((len(tree.l0) for tree in trees), default=0),
        names.DB_SORTED_RUN_COUNT: sum(len(tree.runs) for tree in trees),
        names.DB_SST_VIEW_COUNT: len(views),
        names.DB_SST_COUNT: len({view.sst_id for view in views}),
        names.DB_EXTERNAL_DB_COUNT: len(manifest.external_dbs),
        names.DB_LAST_L0_SEQ: manifest.last_l0_seq,
        names.DB_LIVE_BYTES: live_bytes(manifest),
        names.DB_CHECKPOINT_COUNT: len(manifest.checkpoints),
        names.DB_WRITER_EPOCH: manifest.writer_epoch,
    }


def live_bytes(manifest: Manifest) -> int:
    """The estimated size of the different SSTs in a manifest."""
    views = [view for tree in manifest.trees for view in tree.l0]
    views += [view for tree in manifest.trees for run in tree.runs for view in run.views]
    sizes = {view.sst_id: manifest.sst(view).info.estimated_size for view in views}
    return sum(sizes.values())


def measure(handle: Any) -> list[Metric]:
    """All metrics of an open database, whatever its API, brought up to date. Makes no request."""
    blocking = getattr(handle, "_reads", handle)  # what the asyncio form of a handle calls
    found: list[Metric] = blocking._measure()  # noqa: SLF001 - no caller of the database needs it
    return found


class EngineReport:
    """The metrics of a writer that its services do not count themselves."""

    def __init__(self, engine: Engine) -> None:
        metrics = engine.env.metrics
        names.register(metrics)
        self._engine = engine
        self._requests = RequestReport(
            metrics, clock=engine.env.clock, price_list=engine.env.settings.price_list
        )
        self._flushes = metrics.counter(names.DB_REQUEST_COUNT, op="flush")
        self.flushes: Operation = Operation(
            metrics.histogram(names.DB_OPERATION_SECONDS, op="flush"), "flush"
        )
        self._memtable_flushes = metrics.counter(names.MEMTABLE_FLUSH_FLUSH_REQUEST_COUNT)
        self._checkpoints = metrics.counter(names.MEMTABLE_FLUSH_CHECKPOINT_REQUEST_COUNT)

    def flush_requested(self, kind: str) -> None:
        """A caller has requested a flush."""
        self._flushes.add()
        if kind == "memtable":
            self._memtable_flushes.add()

    def checkpoint_requested(self) -> None:
        """A caller has requested a checkpoint."""
        self._checkpoints.add()

    def cost(self, *, gets: int, scans: int) -> dict[str, Any]:
        """What the database has cost since it was opened."""
        self.update(gets=gets, scans=scans)
        return self._requests.cost()

    def update(self, *, gets: int, scans: int) -> None:
        """Update all metrics. `gets` are the point reads that no memtable has counted."""
        self._engine.manifest.views.ssts.report()
        self._engine.state.report()
        counted = self._engine.state.now.memtables.lookups
        self._requests.update_reads(gets=gets + counted, scans=scans)
        self._requests.update_shape(self._engine.manifest.current)
