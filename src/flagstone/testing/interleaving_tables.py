"""A model of how tables come and go, for `interleaving.explore`: a writer, a compactor and a collector.

Uploading a table and naming it in the manifest are two steps, and a collector that looks in between must tell the
table from garbage. It has no clock to do so, only the times in the ids and the order in which it looks. The clock of
the compactor may lag behind the writer's by any amount.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

from flagstone.testing.interleaving import Exploration, Operation, Process, explore

Flaw = Literal[
    "none", "manifest before jobs", "tables listed last", "no regard for flushes", "no regard for jobs"
]

Table = tuple[int, str]
"""The time in its id, and its name."""


class Tables(NamedTuple):
    """The store, the manifest (L0 and one run) and the compactions file; `now` counts the ids given out."""

    stored: frozenset[Table] = frozenset()
    l0: tuple[Table, ...] = ()
    run: tuple[Table, ...] = ()
    newest_l0: int | None = None
    compacted: Table | None = None
    """The newest table of L0 that a compaction took."""
    jobs: tuple[tuple[int, str], ...] = ()
    now: int = 0


def check_tables(world: Tables) -> str | None:
    """Every table that the manifest names exists."""
    missing = {*world.l0, *world.run} - world.stored
    return (
        f"{', '.join(name for _, name in sorted(missing))} is in the manifest and was deleted"
        if missing
        else None
    )


def explore_tables(
    *,
    flushes: int = 2,
    failed_flushes: int = 1,
    jobs: int = 1,
    rounds: int = 1,
    lag: int = 0,
    flaw: Flaw = "none",
) -> Exploration:
    """A writer, some of whose uploads come to nothing, a compactor whose clock is `lag` behind, and a collector."""
    processes = {
        "writer": partial(_writer, flushes, failed_flushes),
        "compactor": partial(_compactor, jobs, lag),
        "collector": partial(_collector, rounds, flaw),
    }
    return explore(Tables(), processes, check_tables)


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
        listed: frozenset[Table] | None = None
        if flaw != "tables listed last":
            listed = yield _list_tables
        if flaw == "manifest before jobs":
            named, newest_l0, compacted = yield _read_manifest
            oldest_job = yield _read_jobs
        else:
            oldest_job = yield _read_jobs
            named, newest_l0, compacted = yield _read_manifest
        if listed is None:
            listed = yield _list_tables
        left = _plan(listed - named, newest_l0, oldest_job, compacted, flaw)
        while left:
            yield _delete(left[0])
            left = left[1:]


def _plan(
    unnamed: frozenset[Table],
    newest_l0: int | None,
    oldest_job: int | None,
    compacted: Table | None,
    flaw: Flaw,
) -> tuple[Table, ...]:
    limits = [] if flaw == "no regard for flushes" else [-1 if newest_l0 is None else newest_l0]
    limits += [] if oldest_job is None or flaw == "no regard for jobs" else [oldest_job]
    return tuple(
        sorted(table for table in unnamed if table == compacted or all(table[0] < limit for limit in limits))
    )


def _mint_l0(world: Tables) -> tuple[Tables, int]:
    stamp = max(world.now + 1, world.newest_l0 or 0)
    return world._replace(now=world.now + 1), stamp


def _submit(lag: int) -> Operation:
    def submit(world: Tables) -> tuple[Tables, int]:
        newest = max((job for job, _ in world.jobs), default=0)
        job = max(world.now + 1 - lag, newest)
        # Of the finished jobs only the newest is remembered, as in the compactions file.
        return world._replace(now=world.now + 1, jobs=((job, "active"),)), job

    return submit


def _mint_output(lag: int, job: int) -> Operation:
    return lambda world: (world._replace(now=world.now + 1), max(world.now + 1 - lag, job))


def _upload(table: Table) -> Operation:
    return lambda world: (world._replace(stored=world.stored | {table}), None)


def _commit_l0(table: Table) -> Operation:
    return lambda world: (world._replace(l0=(*world.l0, table), newest_l0=table[0]), None)


def _read_l0(world: Tables) -> tuple[Tables, tuple[Table, ...]]:
    return world, world.l0


def _commit_run(sources: tuple[Table, ...], output: Table) -> Operation:
    def commit_run(world: Tables) -> tuple[Tables, None]:
        kept = tuple(table for table in world.l0 if table not in sources)
        return world._replace(l0=kept, run=(output,), compacted=max(sources)), None

    return commit_run


def _complete(job: int) -> Operation:
    return lambda world: (world._replace(jobs=((job, "finished"),)), None)


def _list_tables(world: Tables) -> tuple[Tables, frozenset[Table]]:
    return world, world.stored


def _read_jobs(world: Tables) -> tuple[Tables, int | None]:
    return world, min((job for job, status in world.jobs if status == "active"), default=None)


def _read_manifest(world: Tables) -> tuple[Tables, tuple[frozenset[Table], int | None, Table | None]]:
    return world, (frozenset({*world.l0, *world.run}), world.newest_l0, world.compacted)


def _delete(table: Table) -> Operation:
    return lambda world: (world._replace(stored=world.stored - {table}), None)
