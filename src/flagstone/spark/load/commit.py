"""The commit of a bulk load on the driver: all SSTs become part of the database with one manifest.

1. `begin_load` adds the load record, which fixes the sequence number (`flagstone.spark.load.request`).
2. Tasks build SSTs whose rows have that sequence number (`flagstone.spark.load.task`).
3. `commit_load` merges SSTs that overlap, and offers the load until a writer, or the driver itself, has adopted it
   (`flagstone.spark.load.adoption`).

A failure before the adoption leaves the database unchanged, and SSTs that garbage collection deletes when the load
record has expired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from flagstone.clones.origin import load_origin
from flagstone.errors import FlagstoneError
from flagstone.loads.edit import Load
from flagstone.loads.lifetime import find_load_record
from flagstone.loads.request import request_path
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.annotations import load_sst_id
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.schema import SchemaChanged
from flagstone.spark.address import open_manifests, open_store
from flagstone.spark.load.adoption import ConditionFailed, LoadOffer, judge
from flagstone.spark.load.heartbeat import confirm_plan, lapsed
from flagstone.spark.load.overlaps import check_writable, merge_overlaps, order_ssts
from flagstone.spark.load.plan import LoadPlan, LoadReport, MadeSst, ulid_at
from flagstone.spark.load.request import cancel_request, written_before
from flagstone.spark.load.segments import by_segment
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.spark.stored_schema import Condition, retired_schemas, settle_schema
from flagstone.types import Seq

_log = logging.getLogger("flagstone.spark")


def commit_load(
    plan: LoadPlan,
    options: WriteOptions,
    made: Sequence[MadeSst],
    *,
    replaces_all: bool = False,
    expects: Sequence[Condition] = (),
    offered: Callable[[Seq], None] = lambda _: None,
) -> LoadReport:
    """Add all SSTs to the database with one manifest. A load without SSTs only stores its schema, if that is new.

    SSTs with overlapping keys are merged first, unless the rows are declared as sorted. With `replaces_all` the same
    manifest removes all older data: everything that was committed before, other loads included. `offered` is called
    with each sequence number under which the load may become visible, before it may.

    After `Unavailable` or a crash all of the load is visible, or none of it. A repeated call commits nothing twice.

    Raises:
        Closed: the load was cancelled, or its record lapsed; none of it is visible.
        ConditionFailed: a key of `expects` has another value; none of the load is visible.
        TransactionConflict: another commit has changed the schema since the load was planned; none of it is visible.
        Unavailable: the store did not answer, or no process could adopt the load.
        InvalidRequest: tasks wrote overlapping keys, or keys outside the writable range of the clone.

    """
    address = plan.address
    store, paths = open_store(address)
    manifests = open_manifests(address)
    extractor = options.load_segment_extractor()
    latest = manifests.require_latest()
    held = find_load_record(latest.value, plan.record_id)
    planned = options.planned_schema
    changes = bool(made) or replaces_all or (planned is not None and planned.changed)
    if not changes and (held is None or held.record.state != "done"):
        return _without_effect(plan, manifests)
    if held is None and not made:
        # It lapsed before the first task. Without an SST nothing was lost.
        plan = confirm_plan(plan, manifests)
    elif judge(latest.value, plan, [each.sst for each in made], plan.seq) == "added":
        return _report(plan, latest, made, plan.seq)
    elif held is not None and held.record.tag is not None:
        plan = replace(plan, tag=held.record.tag)
    if any(load_sst_id(plan.id_ms, plan.tag, each.sst.id) != each.sst.id for each in made):
        raise lapsed(None)
    settled = _merged(plan, options, made, extractor)
    rows = sum(each.rows for each in settled)
    conditions, relied, system = list(expects), None, []
    others = retired_schemas(address, planned) if replaces_all else []
    if planned is not None:
        row, relied = settle_schema(address, planned)
        conditions.append(relied)
        system += [] if row is None else [(relied[0], row)]
    conditions += [(key, now) for key, now, _ in others]
    system += [(key, retired) for key, _, retired in others]
    if system:
        own = _system_ssts(plan, options, sorted(system))
        joined = replace(options, presorted=False, in_order=True)
        settled = _merged(plan, joined, [*settled, *own], extractor)
    if not settled and not replaces_all:  # another load has stored the schema meanwhile
        return _without_effect(plan, manifests)
    load = replace(
        _load(plan, settled, extractor, replaces_all=replaces_all),
        expects=tuple(conditions),
        only_if_new=options.only_if_new,
    )
    origin = load_origin(store, paths)
    check_writable(load.ssts, None if origin is None else origin.writable)
    timeout_s = options.hand_over_timeout.total_seconds()
    offer = LoadOffer(
        plan, load, manifests=manifests, timeout_s=timeout_s, extractor=extractor, offered=offered
    )
    try:
        latest = offer.commit()
    except ConditionFailed:
        changed = planned is not None and settle_schema(address, planned)[1] != relied
        if changed or (replaces_all and retired_schemas(address, planned) != others):
            raise SchemaChanged(
                "another load has changed the schema in the moment in which this one was added; load again"
            ) from None
        if options.only_if_new and not expects:
            raise written_before(plan.address) from None
        raise
    unused = sorted({each.sst.id for each in made} - {sst.id for sst in offer.load.ssts})
    # The load is committed, and no manifest ever referred to SSTs that were merged or copied before. Garbage
    # collection deletes what this call leaves.
    with suppress(FlagstoneError):
        store.delete_many([request_path(paths, plan.record_id), *map(paths.sst, unused)])
    report = replace(_report(plan, latest, settled, offer.load.seq), rows=rows)
    _log.info("loaded rows=%d tables=%d seq=%d", report.rows, report.tables, report.seq)
    return report


def _without_effect(plan: LoadPlan, manifests: ManifestStore) -> LoadReport:
    """The report of a load that changes nothing, whose record is removed."""
    cancel_request(manifests, plan.record_id)
    return _report(plan, manifests.require_latest(), (), plan.seq)


def _merged(
    plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst], extractor: SegmentExtractor | None
) -> list[MadeSst]:
    """The SSTs without overlaps, in key order within each segment."""
    settled: list[MadeSst] = []
    for of_segment in by_segment(made, extractor).values():
        if options.presorted:
            # Refuses overlaps of rows that were declared as sorted.
            order_ssts([each.sst for each in of_segment])
            settled += of_segment
        else:
            settled += merge_overlaps(plan, options, of_segment)
    return settled


def _system_ssts(plan: LoadPlan, options: WriteOptions, rows: Sequence[tuple[bytes, bytes]]) -> list[MadeSst]:
    """The SSTs of the schema rows, which become visible with the rows. `rows` are sorted."""
    keys, values = zip(*rows, strict=True)
    batch = pa.RecordBatch.from_pydict({"key": list(keys), "value": list(values)})
    own = WriteOptions(
        plan.address, sst_options=options.sst_options, segment_extractor=options.segment_extractor
    )
    return write_ssts([batch], plan, own)


def _load(
    plan: LoadPlan, made: Sequence[MadeSst], extractor: SegmentExtractor | None, *, replaces_all: bool
) -> Load:
    grouped = {
        prefix: order_ssts([each.sst for each in of_segment])
        for prefix, of_segment in sorted(by_segment(made, extractor).items())
    }
    return Load(
        tuple(sst for ssts in grouped.values() for sst in ssts),
        plan.seq,
        plan.created_ms,
        ulid_at(plan.id_ms + 1, plan.address.ids),
        replaces_all,
        prefixes=() if extractor is None else tuple(prefix for prefix, ssts in grouped.items() for _ in ssts),
    )


def _report(plan: LoadPlan, latest: Versioned[Manifest], made: Sequence[MadeSst], seq: Seq) -> LoadReport:
    """The report of a load; its record knows the manifest that added it, and the sequence number."""
    held = find_load_record(latest.value, plan.record_id)
    manifest_id = latest.id
    if held is not None and held.record.state == "done":
        seq = held.record.seq
        # For a load that replaces data, the checkpoint keeps the manifest before.
        manifest_id = held.checkpoint.manifest_id + held.record.replaces
    return LoadReport(
        rows=sum(each.rows for each in made),
        tables=len(made),
        bytes=sum(each.bytes for each in made),
        seq=seq,
        manifest_id=manifest_id,
    )
