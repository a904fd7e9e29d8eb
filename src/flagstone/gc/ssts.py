"""Garbage among the SSTs, and why deleting it is safe.

An SST that no manifest names is garbage, or it is about to be named: a flush or a compaction uploads first and commits
afterwards. The order in which a round reads things separates the two, without a clock:

1. The round lists the SSTs. It never touches an SST that is not listed.
2. It reads the compactions file. A job that uploaded a listed SST was in the file before the upload. Either the job is
   still active in the file: then its outputs, whose ids are not older than the job's, are kept. Or it is finished: if
   it is completed a manifest names its outputs, if it is failed no manifest ever will. If the file does not exist or
   lists no active job, no listed SST belongs to a job that can still commit.
3. It reads the manifest. A writer creates SST ids in the order in which it commits them, none older than the newest
   L0 SST. So the SSTs that it is about to commit are not older than the newest L0 SST of this manifest: they are kept.
   A fenced writer commits nothing. One SST that is not older is known to be committed already: the one that the tree
   records as the newest compacted L0 SST. The SSTs of a bulk load have a tag in their ids, and its load record is in
   the manifest before the first one is uploaded: SSTs with the tag of an open record are kept. A record that expired
   was removed before the manifest was read. No later manifest can name its SSTs: they go, whatever their time.

SlateDB requires more in step 2: the file must have at least one job, finished or not, whose id is newer. So without a
compactor it never deletes an SST. The argument above does not need that, because the list is made before the file is
read. Everything else that SlateDB keeps is kept here too.

A process that adds SSTs to a manifest in any other way must do it within the minimum age, or as a job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from flagstone.gc.plan import Plan, Verdict, drop, keep
from flagstone.loads.request import oldest_open_ms
from flagstone.metadata.annotations import LoadRecord, load_prefix_of
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_ms
from flagstone.store.port import ObjectMeta
from flagstone.types import Ulid


class SstObject(NamedTuple):
    """One SST in the database's own folder."""

    id: Ulid
    meta: ObjectMeta


class Cutoff(NamedTuple):
    """Only SSTs whose ids are older than `before_ms` can be garbage; `reason` is why the others are kept."""

    before_ms: int
    reason: str


def sst_cutoff(latest: Manifest, compactions: Compactions | None) -> Cutoff:
    """The id time from which SSTs may belong to a flush, compaction or bulk load under way."""
    newest_l0 = latest.newest_l0
    if newest_l0 is None:
        return Cutoff(0, "perhaps the first flush")
    flushes = Cutoff(ulid_ms(newest_l0), "perhaps of a flush under way")
    cutoffs = [flushes]
    active = [job.id for job in compactions.jobs if not job.status.finished] if compactions else []
    if active:
        cutoffs.append(Cutoff(ulid_ms(min(active)), "perhaps of a compaction under way"))
    loading_ms = oldest_open_ms(latest)
    if loading_ms is not None:
        cutoffs.append(Cutoff(loading_ms, "perhaps of a bulk load under way"))
    return min(cutoffs, key=lambda cutoff: cutoff.before_ms)


def compacted_l0(latest: Manifest) -> set[Ulid]:
    """For each tree the newest L0 SST that was compacted."""
    return {tree.last_compacted_l0 for tree in latest.trees if tree.last_compacted_l0 is not None}


def plan_ssts(
    listed: Iterable[SstObject],
    *,
    referenced: Collection[Ulid],
    cutoff: Cutoff,
    compacted: Collection[Ulid] = (),
    loads: Collection[LoadRecord] = (),
    dead: Collection[LoadRecord] = (),
) -> Plan:
    """Plan the listed SSTs; `referenced` are those of the latest manifest and of all that checkpoints name.

    Those in `compacted` were committed, whatever the time in their ids. `loads` are the records of open bulk loads,
    and `dead` those whose records were removed before the latest manifest was read.
    """
    open_prefixes = {record.id_prefix for record in loads if record.tag is not None}
    dead_prefixes = {record.id_prefix for record in dead if record.tag is not None}

    def judge(sst: SstObject) -> Verdict:
        if sst.id in referenced:
            return keep(sst.meta, sst.id, "referenced")
        stamped_ms, prefix = ulid_ms(sst.id), load_prefix_of(sst.id)
        if prefix in open_prefixes:
            return keep(sst.meta, sst.id, "of a bulk load under way")
        if prefix in dead_prefixes:
            return drop(sst.meta, sst.id, "of a bulk load that ended", stamped_ms=stamped_ms)
        if stamped_ms >= cutoff.before_ms and sst.id not in compacted:
            return keep(sst.meta, sst.id, cutoff.reason)
        return drop(sst.meta, sst.id, "unreferenced", stamped_ms=stamped_ms)

    return Plan("compacted", tuple(judge(sst) for sst in listed))
