"""Which tables nobody can need any more.

A table that no manifest names is garbage, or it is about to be named: a flush or a compaction uploads first and
commits afterwards. The two are told apart without a clock, by the order in which a round looks at things:

1. It lists the tables. What is not on the list is not touched.
2. It reads the compactions file. Whoever made a listed table as part of a job had that job in the file by then.
   So the job is either still active there, and its outputs carry ids no older than the job's: kept. Or it is
   finished: completed means that a manifest names the outputs, failed means that none ever will. A file that does
   not exist, or lists no active job, says that no listed table belongs to a job that could still commit.
3. It reads the manifest. A writer gives out ids of tables in the order in which it commits them, and none
   older than the newest of L0. So what it is about to commit is not older than the newest L0 of this
   manifest: kept. A writer that was replaced commits nothing any more. One such table is known to have been
   committed already: the one that the tree remembers as the newest L0 that was compacted. A bulk load beside a
   writer has its mark in the manifest before its first table, and ids no older than the mark says: kept.

SlateDB demands more of the second step: that the file has at least one job, finished or not, whose id is newer. Without
a compactor it therefore never deletes a table. The argument above does not need that, because the list was made
before the file was read; everything else SlateDB keeps is kept here, too.

Whoever adds tables to a manifest in any other way must do it within the minimum age, or as a job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from flagstone.maintenance.gc.plan import Plan, Verdict, drop, keep
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.hand_over import oldest_open_ms
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_ms
from flagstone.store.port import ObjectMeta
from flagstone.types import Ulid


class TableObject(NamedTuple):
    """One table in the database's own folder."""

    id: Ulid
    meta: ObjectMeta


class Cutoff(NamedTuple):
    """Only tables stamped before `before_ms` can be garbage; `reason` is why the others stay."""

    before_ms: int
    reason: str


def table_cutoff(latest: Manifest, compactions: Compactions | None) -> Cutoff:
    """What flushes and compactions under way may have uploaded already, by the time in the ids."""
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
    """Tables that were part of L0, and the newest of it, when a compaction took them."""
    return {tree.last_compacted_l0 for tree in latest.trees if tree.last_compacted_l0 is not None}


def plan_tables(
    listed: Iterable[TableObject],
    *,
    referenced: Collection[Ulid],
    cutoff: Cutoff,
    compacted: Collection[Ulid] = (),
) -> Plan:
    """Judge the listed tables; `referenced` are those of the latest manifest and of all that checkpoints pin.

    Those in `compacted` are not under way, whatever their time.
    """

    def judge(table: TableObject) -> Verdict:
        if table.id in referenced:
            return keep(table.meta, table.id, "referenced")
        stamped_ms = ulid_ms(table.id)
        if stamped_ms >= cutoff.before_ms and table.id not in compacted:
            return keep(table.meta, table.id, cutoff.reason)
        return drop(table.meta, table.id, "unreferenced", stamped_ms=stamped_ms)

    return Plan("compacted", tuple(judge(table) for table in listed))
