"""Bulk loads: beside a writer, which adopts them, and into a database that no process has open; several at once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from flagstone.errors import Closed, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.heartbeat import confirm_plan
from flagstone.spark.load.plan import MadeSst
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.history import Change, Kind
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.types import Seq

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


def load(world: World, process: Process) -> None:
    """The life of a process that loads rows in bulk."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / (5 * world.plan.idle_s)))
        address = DatabaseAddress(
            MAIN_PATH, clock=process.machine, ids=world.ids(process), **world.stores(process)
        )
        try:
            _load_once(world, process, address)
        except (Closed, Unavailable, TransactionConflict, InvalidRequest, CorruptData) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"load: {describe(error)}")


def _load_once(world: World, process: Process, address: DatabaseAddress) -> None:
    random, oracle = world.random, world.main.oracle
    if oracle.latest is None:
        return  # the oracle learns from a writer how the database begins
    plan = begin_load(address, create=False)
    begun = world.main.loads_begun_ns
    begun[plan.seq] = world.scheduler.now_ns
    world.scheduler.note(f"load {plan.seq} began")
    options = WriteOptions(
        address,
        max_sst_bytes=random.choice((500, 100_000)),
        hand_over_timeout=timedelta(seconds=random.choice((5, 90))),
    )
    changes = _draw_changes(world, process)
    made: list[MadeSst] = []
    # Two tasks with overlapping keys, or one. Some loads are so long that another one overtakes them, or that their
    # record lapses.
    for part in (changes[::2], changes[1::2]) if random.random() < 0.5 else (changes,):
        plan = confirm_plan(plan)
        made += write_ssts([_batch(part)], plan, options)
        process.machine.sleep(random.choice((0.0, 1.0, 60.0, 400.0)))
    intent = oracle.begin_load(changes, plan.seq)

    def offered(seq: Seq) -> None:
        if seq != intent.planned_seq:
            world.done["load renumbered"] += 1
            oracle.renumber_load(intent, seq)
            begun[seq] = begun[plan.seq]

    try:
        commit_load(plan, options, made, offered=offered)
    except Closed:
        oracle.drop_load(intent)
        raise
    except (Unavailable, InvalidRequest):
        if random.random() < 0.5 and abort_load(plan):
            world.done["load aborted"] += 1
            oracle.drop_load(intent)
        raise
    oracle.finish_load(intent)
    world.done["load adopted"] += 1


def _draw_changes(world: World, process: Process) -> list[Change]:
    random = world.random
    changes: dict[bytes, Change] = {}
    for _ in range(random.randrange(2, 12)):
        key, value, expires_ms = world.new_key(), world.new_value(), None
        kind: Kind = random.choice(("put", "put", "delete"))
        if key.startswith(b"m") and random.random() < 0.5:
            kind = "merge"
        elif kind == "put" and key.startswith(b"k") and random.random() < 0.2:
            expires_ms = process.machine.now_ms() + random.choice((2_000, 4_000_000))
        changes[key] = Change(kind, key, b"" if kind == "delete" else value, expires_ms)
    return list(changes.values())


def _batch(changes: list[Change]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([change.key for change in changes], pa.binary()),
            "value": pa.array([change.value for change in changes], pa.binary()),
            "op": pa.array([change.kind for change in changes], pa.string()),
            "expires_ms": pa.array([change.expires_ms for change in changes], pa.int64()),
        }
    )
