"""Manifests, compactions files and checkpoints as plain values for JSON, under SlateDB's own field names.

Keys are written as in `inspector.text.json_text`. ULIDs and UUIDs are text. A time is given twice: in seconds since
the epoch, and as RFC 3339. A new version of Flagstone may add fields, but removes none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from flagstone.cli.parsing import KeyForm, parse_bytes
from flagstone.compaction.picker import plan_full
from flagstone.errors import InvalidRequest
from flagstone.format.codec import Codec
from flagstone.format.sst_info import SsTableInfo
from flagstone.inspector.text import json_text, time_text
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import BoundKind, BytesRange, SstView, Tree
from flagstone.metadata.compactions import Compactions, DrainSpec, Job, Spec, TieredSpec
from flagstone.metadata.manifest import Checkpoint, ExternalDb, Manifest, SsTable
from flagstone.runtime.ids import parse_ulid, ulid_ms, ulid_text
from flagstone.store.port import ObjectMeta
from flagstone.types import RunId, Ulid


def manifest_document(manifest_id: int, manifest: Manifest) -> dict[str, Any]:
    """A whole manifest."""
    return {
        "id": manifest_id,
        "initialized": manifest.initialized,
        "writer_epoch": manifest.writer_epoch,
        "compactor_epoch": manifest.compactor_epoch,
        "replay_after_wal_id": manifest.replay_after_wal_id,
        "wal_id_last_seen": manifest.wal_id_last_seen,
        "next_wal_sst_id": manifest.wal_id_last_seen + 1,
        "last_l0_seq": manifest.last_l0_seq,
        "last_l0_clock_tick": manifest.last_l0_clock_tick,
        "recent_snapshot_min_seq": manifest.recent_snapshot_min_seq,
        **_tree(manifest, manifest.tree),
        # SlateDB prints this field, although version 2 of the format does not store it.
        "last_compacted_l0_sst_id": None,
        "segments": [
            {"prefix": json_text(segment.prefix), **_tree(manifest, segment.tree)}
            for segment in manifest.segments
        ],
        "segment_extractor_name": manifest.segment_extractor_name,
        "sequence_tracker": _tracker(manifest.sequence_tracker),
        "checkpoints": [checkpoint_document(checkpoint) for checkpoint in manifest.checkpoints],
        "external_dbs": [_external(external) for external in manifest.external_dbs],
        "wal_object_store_uri": manifest.wal_object_store_uri,
    }


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """One checkpoint; a null `expire_time` means that it never expires."""
    return {
        "id": str(checkpoint.id),
        "manifest_id": checkpoint.manifest_id,
        "name": checkpoint.name,
        "create_time": time_text(checkpoint.created_s),
        "create_time_secs": checkpoint.created_s,
        "expire_time": time_text(checkpoint.expires_s),
        "expire_time_secs": checkpoint.expires_s,
    }


def object_document(meta: ObjectMeta) -> dict[str, Any]:
    """The path, size and time of an object."""
    return {
        "location": meta.path,
        "size": meta.size,
        "last_modified": time_text(meta.last_modified_ms / 1000),
    }


def compactions_document(compactions_id: int, compactions: Compactions) -> dict[str, Any]:
    """A whole compactions file."""
    return {
        "id": compactions_id,
        "compactor_epoch": compactions.compactor_epoch,
        "recent_compactions": [job_document(job) for job in compactions.jobs],
    }


def job_document(job: Job) -> dict[str, Any]:
    """One compaction job; `bytes_processed` is the size of the SSTs it has written so far."""
    context = job.context
    written = list(job.output_ssts)
    if context is not None:
        written += [sst for part in context.subcompactions for sst in part.output_ssts]
    return {
        "id": ulid_text(job.id),
        "create_time": time_text(ulid_ms(job.id) / 1000),
        "status": job.status.name.capitalize(),
        "active": not job.status.finished,
        "spec": spec_document(job.spec),
        "bytes_processed": sum(sst.info.estimated_size for sst in written),
        "output_ssts": [_sst(sst) for sst in job.output_ssts],
        "worker": None
        if job.worker is None
        else {"worker_id": job.worker.id, "last_heartbeat_ms": job.worker.last_heartbeat_ms},
        "ctx": None
        if context is None
        else {
            "retention_min_seq": context.retention_min_seq,
            "subcompactions": [
                {"range": _range(part.range), "output_ssts": [_sst(sst) for sst in part.output_ssts]}
                for part in context.subcompactions
            ],
        },
    }


def spec_document(spec: Spec) -> dict[str, Any]:
    """The sources and destination of a job, in the form that `submit-compaction` accepts under "Spec"."""
    sources: list[dict[str, Any]] = [{"SstView": ulid_text(view_id)} for view_id in spec.l0_view_ids]
    sources += [{"SortedRun": run_id} for run_id in spec.sorted_runs]
    kind = "Tiered" if isinstance(spec, TieredSpec) else "DrainSegment"
    return {
        "kind": kind,
        "segment": json_text(spec.segment),
        "sources": sources,
        "destination": spec.destination if isinstance(spec, TieredSpec) else None,
    }


def _tree(manifest: Manifest, tree: Tree) -> dict[str, Any]:
    return {
        "last_compacted_l0_sst_view_id": _ulid(tree.last_compacted_l0),
        "l0": [_view(manifest, view) for view in tree.l0],
        "compacted": [
            {
                "id": run.id,
                "estimated_size_bytes": sum(manifest.sst(view).info.estimated_size for view in run.views),
                "sst_views": [_view(manifest, view) for view in run.views],
            }
            for run in tree.runs
        ],
    }


def _view(manifest: Manifest, view: SstView) -> dict[str, Any]:
    sst = manifest.sst(view)
    return {
        "id": ulid_text(view.id),
        "sst": _sst(sst),
        "visible_range": None if view.visible_range is None else _range(view.visible_range),
        "estimated_size_bytes": sst.info.estimated_size,
        "external_db": manifest.path_of_owner(view.sst_id),
    }


def _sst(sst: SsTable) -> dict[str, Any]:
    return {
        "id": ulid_text(sst.id),
        "format_version": sst.format_version,
        "estimated_size_bytes": sst.info.estimated_size,
        "info": _info(sst.info),
    }


def _info(info: SsTableInfo) -> dict[str, Any]:
    return {
        "first_entry": None if info.first_entry is None else json_text(info.first_entry),
        "last_entry": None if info.last_entry is None else json_text(info.last_entry),
        "index_offset": info.index_offset,
        "index_len": info.index_len,
        "filter_offset": info.filter_offset,
        "filter_len": info.filter_len,
        "compression_codec": None if info.codec is Codec.NONE else info.codec.title,
        "sst_type": info.sst_type.name.capitalize(),
        "stats_offset": info.stats_offset,
        "stats_len": info.stats_len,
        "filter_format": info.filter_format.name.capitalize(),
    }


def _range(stored: BytesRange) -> dict[str, Any]:
    return {
        "start": None if stored.start.key is None else json_text(stored.start.key),
        "start_inclusive": stored.start.kind is not BoundKind.EXCLUDED,
        "end": None if stored.end.key is None else json_text(stored.end.key),
        "end_inclusive": stored.end.kind is BoundKind.INCLUDED,
    }


def _external(external: ExternalDb) -> dict[str, Any]:
    final = external.final_checkpoint_id
    return {
        "path": external.path,
        "source_checkpoint_id": str(external.source_checkpoint_id),
        "final_checkpoint_id": None if final is None else str(final),
        "sst_ids": [ulid_text(sst_id) for sst_id in external.sst_ids],
    }


def _tracker(tracker: SequenceTracker) -> dict[str, Any]:
    """The first and last point of the tracker. It has thousands of points, in which `seq-to-ts` searches."""
    first, last = (
        (
            {
                "seq": tracker.sequences[end],
                "time": time_text(tracker.seconds[end]),
                "time_secs": tracker.seconds[end],
            }
            if tracker.sequences
            else None
        )
        for end in (0, -1)
    )
    return {"points": len(tracker.sequences), "first": first, "last": last}


def _ulid(ulid: Ulid | None) -> str | None:
    return None if ulid is None else ulid_text(ulid)


_FORMS: Final = '"Full", {"FullSegment": {"segment": …}} or {"Spec": {"sources": […], "destination": …}}'


def plan_request(text: str, manifest: Manifest, compactions: Compactions) -> Sequence[Spec]:
    """The jobs that a request asks for, given the current manifest and jobs.

    Raises:
        InvalidRequest: the text is not a request, or there is no such segment.

    """
    try:
        request = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the request is not JSON ({error}); write {_FORMS}") from None
    match request:
        case "Full":
            return plan_full(manifest, compactions, None)
        case {"FullSegment": {"segment": segment}, **rest} if not rest:
            prefix = _bytes(segment)
            if manifest.tree_of(prefix) is None:
                raise InvalidRequest(f"there is no segment {segment!r}; read-manifest lists the segments")
            return plan_full(manifest, compactions, prefix)
        case {"Spec": {"DrainSegment": dict() as spec}, **rest} if not rest:
            return [_drain(spec)]
        case {"Spec": {"Tiered": dict() as spec}, **rest} if not rest:
            return [_tiered(spec)]
        case {"Spec": dict() as spec, **rest} if not rest:
            return [_tiered(spec)]
        case _:
            raise InvalidRequest(f"{text} is not a compaction request; write {_FORMS}")


def _tiered(spec: dict[str, Any]) -> TieredSpec:
    views, runs = _sources(spec)
    destination = spec.get("destination")
    if not isinstance(destination, int) or isinstance(destination, bool) or not 0 <= destination < 2**32:
        raise InvalidRequest(
            f"the destination of a compaction is the id of a sorted run, not {destination!r}"
        )
    return TieredSpec(views, runs, RunId(destination), _bytes(spec.get("segment", "")))


def _drain(spec: dict[str, Any]) -> DrainSpec:
    views, runs = _sources(spec)
    return DrainSpec(_bytes(spec.get("segment", "")), views, runs)


def _sources(spec: dict[str, Any]) -> tuple[tuple[Ulid, ...], tuple[RunId, ...]]:
    views: list[Ulid] = []
    runs: list[RunId] = []
    sources = spec.get("sources")
    if not isinstance(sources, list):
        raise InvalidRequest('a compaction needs "sources", such as [{"SstView": "01H…"}, {"SortedRun": 3}]')
    for source in sources:
        match source:
            case {"SstView": str(view)} | {"Sst": str(view)}:
                views.append(parse_ulid(view))
            case {"SortedRun": int(run)} if not isinstance(run, bool):
                runs.append(RunId(run))
            case _:
                raise InvalidRequest(f'a source is {{"SstView": "01H…"}} or {{"SortedRun": 3}}, not {source}')
    return tuple(views), tuple(runs)


def _bytes(value: Any) -> bytes:
    """Bytes in our form (text or 0x…), or in SlateDB's: a list of numbers."""
    if isinstance(value, str):
        return parse_bytes(value, KeyForm.auto, what="segment")
    try:
        return bytes(value)
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"a segment is text, 0x… or a list of numbers below 256, not {value!r}"
        ) from None
