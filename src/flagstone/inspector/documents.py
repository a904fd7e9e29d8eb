"""What the page shows of a manifest and of a compactions file, as plain values for JSON. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flagstone.inspector.decoding import Decoder
from flagstone.inspector.page import Lane, lanes
from flagstone.lsm.tree import Tree
from flagstone.metadata.compactions import Compactions, Job, TieredSpec
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.runtime.ids import ulid_ms, ulid_text
from flagstone.types import Ulid

MAX_BARS: Final = 240
"""A lane with more SSTs than this is drawn as this many groups of neighbours."""

_MAX_LANES: Final = 200
_MAX_SEGMENTS: Final = 50
_TICKS: Final = 9
_MAX_CHECKPOINTS: Final = 200
_MAX_JOBS: Final = 100


def state_document(
    manifest_id: int, manifest: Manifest, compactions: Compactions | None, decoder: Decoder
) -> dict[str, Any]:
    """A manifest, and the jobs of the compactions file if that is of the same time."""
    busy = _busy(compactions)
    named = [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]
    shown = [(prefix, tree) for prefix, tree in named if prefix or not manifest.segments or not tree.empty]
    ms = manifest.last_l0_clock_tick
    return {
        "manifest": manifest_id,
        "initialized": manifest.initialized,
        "writer_epoch": manifest.writer_epoch,
        "compactor_epoch": manifest.compactor_epoch,
        "last_seq": manifest.last_l0_seq,
        "last_flush_ms": ms if ms > 0 else None,
        "replay_after": manifest.replay_after_wal_id,
        **counts(manifest),
        "segment_extractor": manifest.segment_extractor_name,
        "trees": [_tree(prefix, tree, manifest, busy, decoder) for prefix, tree in shown[:_MAX_SEGMENTS]],
        "hidden_trees": max(len(shown) - _MAX_SEGMENTS, 0),
        "jobs": None
        if compactions is None
        else [_job(job, manifest) for job in reversed(compactions.jobs[-_MAX_JOBS:])],
        "checkpoints": [checkpoint_document(each) for each in manifest.checkpoints[-_MAX_CHECKPOINTS:]],
        "hidden_checkpoints": max(len(manifest.checkpoints) - _MAX_CHECKPOINTS, 0),
        "lenders": [
            {
                "path": lender.path,
                "ssts": len(lender.sst_ids),
                "checkpoint": None if lender.final_checkpoint_id is None else str(lender.final_checkpoint_id),
            }
            for lender in manifest.external_dbs
        ],
    }


def counts(manifest: Manifest) -> dict[str, int]:
    """The figures of a manifest that the history draws."""
    l0 = [view for tree in manifest.trees for view in tree.l0]
    runs = [run for tree in manifest.trees for run in tree.runs]
    in_runs = [view for run in runs for view in run.views]
    return {
        "l0": len(l0),
        "l0_bytes": sum(manifest.sst(view).info.estimated_size for view in l0),
        "runs": len(runs),
        "run_ssts": len(in_runs),
        "run_bytes": sum(manifest.sst(view).info.estimated_size for view in in_runs),
    }


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """One checkpoint; `expires_ms` is None if it never expires."""
    return {
        "id": str(checkpoint.id),
        "name": checkpoint.name,
        "manifest": checkpoint.manifest_id,
        "created_ms": checkpoint.created_s * 1000,
        "expires_ms": None if checkpoint.expires_s is None else checkpoint.expires_s * 1000,
    }


def _busy(compactions: Compactions | None) -> set[tuple[bytes, str, int]]:
    """The L0 views and runs that unfinished jobs merge, by segment."""
    jobs = () if compactions is None else (job for job in compactions.jobs if not job.status.finished)
    return {
        (job.spec.segment, kind, source)
        for job in jobs
        for kind, sources in (("l0", job.spec.l0_view_ids), ("run", job.spec.sorted_runs))
        for source in sources
    }


def _tree(
    prefix: bytes, tree: Tree, manifest: Manifest, busy: set[tuple[bytes, str, int]], decoder: Decoder
) -> dict[str, Any]:
    borrowed = frozenset(sst_id for lender in manifest.external_dbs for sst_id in lender.sst_ids)
    found = lanes(manifest, tree)
    sources = [*(("l0", int(view.id)) for view in tree.l0), *(("run", int(run.id)) for run in tree.runs)]
    drawn = [
        (lane, kind, source, _bars(lane, borrowed))
        for lane, (kind, source) in zip(found[:_MAX_LANES], sources, strict=False)
    ]
    borders = sorted({key for *_, bars in drawn for bar in bars for key in (bar["first"], bar["last"])})
    ranks = _ranks(borders)
    ticks = [borders[at * (len(borders) - 1) // (_TICKS - 1)] for at in range(_TICKS)] if borders else []
    return {
        "prefix": decoder.key(prefix) if prefix else None,
        "lanes": [
            {
                "name": lane.name,
                "kind": kind,
                "bytes": lane.bytes,
                "ssts": len(lane.ssts),
                "busy": (prefix, kind, source) in busy,
                "bars": [
                    {
                        **bar,
                        "x0": ranks[bar["first"]],
                        "x1": ranks[bar["last"]],
                        "first": decoder.key(bar["first"]),
                        "last": decoder.key(bar["last"]),
                    }
                    for bar in bars
                ],
            }
            for lane, kind, source, bars in drawn
        ],
        "hidden_lanes": max(len(found) - _MAX_LANES, 0),
        "ticks": [{"x": ranks[key], "key": decoder.key(key)} for key in dict.fromkeys(ticks)],
    }


def _ranks(borders: Sequence[bytes]) -> Mapping[bytes, float]:
    """Where each key is drawn, from 0 to 1: by its place among the others, because keys have no distances."""
    last = max(len(borders) - 1, 1)
    return {key: bisect_left(borders, key) / last for key in borders}


def _bars(lane: Lane, borrowed: frozenset[Ulid]) -> list[dict[str, Any]]:
    """The SSTs of a lane, or groups of neighbours if there are too many. Ends are stored keys or view bounds."""
    size = -(-len(lane.ssts) // MAX_BARS)
    groups: Iterable[Sequence[Any]] = (
        lane.ssts[at : at + size] for at in range(0, len(lane.ssts), size or 1)
    )
    bars = []
    for group in groups:
        keys = [(keys.start or b"", keys.stop or keys.start or b"") for _, keys, _ in group]
        first, stop = min(start for start, _ in keys), max(stop for _, stop in keys)
        bars.append(
            {
                "id": ulid_text(group[0][0].sst_id),
                "count": len(group),
                "bytes": sum(weight for *_, weight in group),
                "made_ms": max(ulid_ms(view.sst_id) for view, *_ in group),
                "first": first,
                # The end of an SST is the key after its last one, which is that key and a zero byte.
                "last": stop[:-1] if stop.endswith(b"\0") else stop,
                "borrowed": sum(1 for view, *_ in group if view.sst_id in borrowed),
                "part": any(view.visible_range is not None for view, *_ in group),
            }
        )
    return bars


def _job(job: Job, manifest: Manifest) -> dict[str, Any]:
    spec, context = job.spec, job.context
    parts = () if context is None else context.subcompactions
    written = [*job.output_ssts, *(sst for part in parts for sst in part.output_ssts)]
    tree = manifest.tree_of(spec.segment)
    views = [] if tree is None else [view for view in tree.l0 if view.id in spec.l0_view_ids]
    views += [] if tree is None else [v for run in tree.runs if run.id in spec.sorted_runs for v in run.views]
    made = [ulid_ms(sst.id) for sst in written]
    heartbeat = job.worker.last_heartbeat_ms if job.worker is not None else 0
    return {
        "id": ulid_text(job.id),
        "status": job.status.name.lower(),
        "active": not job.status.finished,
        "begun_ms": ulid_ms(job.id),
        "seen_ms": max([ulid_ms(job.id), heartbeat, *made]),
        "segment": spec.segment.hex() or None,
        "l0": len(spec.l0_view_ids),
        "runs": list(spec.sorted_runs),
        "destination": spec.destination if isinstance(spec, TieredSpec) else None,
        # The manifest has the sources of a job until it is committed.
        "read_bytes": None
        if job.status.finished
        else sum(manifest.sst(view).info.estimated_size for view in views),
        "written_bytes": sum(sst.info.estimated_size for sst in written),
        "written": len(written),
        "worker": None if job.worker is None else job.worker.id,
    }
