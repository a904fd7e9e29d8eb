"""A model of the life of SSTs: a writer, a compactor and a collector.

Uploading an SST and adding it to the manifest are two steps. A collector that lists the SSTs in between must
distinguish that SST from garbage. It uses no clock, only the times in the ids and the order of its reads. The clock of
the compactor may lag behind the writer's by any amount.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

from interleaving.explorer import Exploration, Operation, Process, explore

Flaw = Literal["none", "manifest before jobs", "SSTs listed last", "flushes ignored", "jobs ignored"]

Sst = tuple[int, str]
"""The time in its id, and its name."""


class Database(NamedTuple):
    """The store, the manifest (L0 and one sorted run) and the compactions file; `now` counts the ids given out."""

    stored: frozenset[Sst] = frozenset()
    l0: tuple[Sst, ...] = ()
    run: tuple[Sst, ...] = ()
    newest_l0: int | None = None
    compacted: Sst | None = None
    """The newest SST of L0 that a compaction merged."""
    jobs: tuple[tuple[int, str], ...] = ()
    now: int = 0


def check_ssts(database: Database) -> str | None:
    """Every SST in the manifest exists."""
    missing = {*database.l0, *database.run} - database.stored
    return (
        f"{', '.join(name for _, name in sorted(missing))} is in the manifest and was deleted"
        if missing
        else None
    )


def explore_ssts(
    *,
    flushes: int = 2,
    failed_flushes: int = 1,
    jobs: int = 1,
    rounds: int = 1,
    lag: int = 0,
    flaw: Flaw = "none",
) -> Exploration:
    """A writer, some of whose uploads fail, a compactor whose clock is `lag` behind, and a collector."""
    processes = {
        "writer": partial(_writer, flushes, failed_flushes),
        "compactor": partial(_compactor, jobs, lag),
        "collector": partial(_collector, rounds, flaw),
    }
    return explore(Database(), processes, check_ssts)


def _writer(flushes: int, failed: int) -> Process:
    number = 0
    while number < flushes + failed:
        name = f"flush {number}"
        stamp = yield _mint_l0
        yield _upload((stamp, name))
        if number >= failed:
            yield _commit_l0((stamp, name))
        number += 1


def _compactor(jobs: int, lag: int) -> Process:
    number = 0
    while number < jobs:
        job = yield _submit(lag)
        sources = yield _read_l0
        if sources:
            stamp = yield _mint_output(lag, job)
            output = (stamp, f"run {number}")
            yield _upload(output)
            yield _commit_run(sources, output)
        yield _complete(job)
        number += 1


def _collector(rounds: int, flaw: Flaw) -> Process:
    number = 0
    while number < rounds:
        number += 1
        listed: frozenset[Sst] | None = None
        if flaw != "SSTs listed last":
            listed = yield _list_ssts
        if flaw == "manifest before jobs":
            named, newest_l0, compacted = yield _read_manifest
            oldest_job = yield _read_jobs
        else:
            oldest_job = yield _read_jobs
            named, newest_l0, compacted = yield _read_manifest
        if listed is None:
            listed = yield _list_ssts
        left = _plan(listed - named, newest_l0, oldest_job, compacted, flaw)
        while left:
            yield _delete(left[0])
            left = left[1:]


def _plan(
    unnamed: frozenset[Sst],
    newest_l0: int | None,
    oldest_job: int | None,
    compacted: Sst | None,
    flaw: Flaw,
) -> tuple[Sst, ...]:
    limits = [] if flaw == "flushes ignored" else [-1 if newest_l0 is None else newest_l0]
    limits += [] if oldest_job is None or flaw == "jobs ignored" else [oldest_job]
    return tuple(
        sorted(sst for sst in unnamed if sst == compacted or all(sst[0] < limit for limit in limits))
    )


def _mint_l0(database: Database) -> tuple[Database, int]:
    stamp = max(database.now + 1, database.newest_l0 or 0)
    return database._replace(now=database.now + 1), stamp


def _submit(lag: int) -> Operation:
    def submit(database: Database) -> tuple[Database, int]:
        newest = max((job for job, _ in database.jobs), default=0)
        job = max(database.now + 1 - lag, newest)
        # Only the newest finished job is kept, as in the compactions file.
        return database._replace(now=database.now + 1, jobs=((job, "active"),)), job

    return submit


def _mint_output(lag: int, job: int) -> Operation:
    return lambda database: (database._replace(now=database.now + 1), max(database.now + 1 - lag, job))


def _upload(sst: Sst) -> Operation:
    return lambda database: (database._replace(stored=database.stored | {sst}), None)


def _commit_l0(sst: Sst) -> Operation:
    return lambda database: (database._replace(l0=(*database.l0, sst), newest_l0=sst[0]), None)


def _read_l0(database: Database) -> tuple[Database, tuple[Sst, ...]]:
    return database, database.l0


def _commit_run(sources: tuple[Sst, ...], output: Sst) -> Operation:
    def commit_run(database: Database) -> tuple[Database, None]:
        kept = tuple(sst for sst in database.l0 if sst not in sources)
        return database._replace(l0=kept, run=(output,), compacted=max(sources)), None

    return commit_run


def _complete(job: int) -> Operation:
    return lambda database: (database._replace(jobs=((job, "finished"),)), None)


def _list_ssts(database: Database) -> tuple[Database, frozenset[Sst]]:
    return database, database.stored


def _read_jobs(database: Database) -> tuple[Database, int | None]:
    return database, min((job for job, status in database.jobs if status == "active"), default=None)


def _read_manifest(database: Database) -> tuple[Database, tuple[frozenset[Sst], int | None, Sst | None]]:
    return database, (frozenset({*database.l0, *database.run}), database.newest_l0, database.compacted)


def _delete(sst: Sst) -> Operation:
    return lambda database: (database._replace(stored=database.stored - {sst}), None)
