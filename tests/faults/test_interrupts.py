"""An exception at every bytecode of every operation that changes a database: nothing is torn, nothing durable is lost.

Each case writes, raises in the middle of one operation, continues, crashes, opens again and compares with a model.
`INTERRUPT_STRIDE=1` tries every bytecode; the default tries one in 97, others in each run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import Closed
from flagstone.kernels import COMPILED
from flagstone.lsm.operators import Concatenate
from flagstone.sst.builder import SstBuilder, encode_sst
from flagstone.sst.output import SstOutput
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import VALUE, Ulid
from flagstone.write.batch import WriteBatch
from kit.databases import MANUAL, copy_of
from kit.faults import Struck, Tracer

pytestmark = pytest.mark.slow

STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "97"))
PATIENCE_S = 20.0


@dataclass
class World:
    """A database, the rows it must have, and the batches of which it must have all rows or none."""

    options: dict[str, Any] = field(default_factory=dict)
    store: MemoryStore = field(default_factory=lambda: MemoryStore(part_bytes=100))
    certain: dict[bytes, bytes] = field(default_factory=dict)
    uncertain: list[dict[bytes, bytes]] = field(default_factory=list)
    number: int = 0
    numbers_per_batch: int = 1

    def __post_init__(self) -> None:
        self.db = self.open(self.store)

    def open(self, store: MemoryStore) -> Db:
        return open_database(
            "db", store=store, settings=replace(MANUAL, **self.options), merge_operator=Concatenate()
        )

    def group(self, rows: int = 3) -> dict[bytes, bytes]:
        """Rows with new keys."""
        self.number += 1
        return {b"%d/%d" % (self.number, row): b"%d" % self.number for row in range(rows)}

    def check(self, db: Db, what: str) -> None:
        found = dict(db.scan())
        for rows in self.uncertain:
            there = sum(found.get(key) == value for key, value in rows.items())
            assert there in (0, len(rows)), f"{what}: {there} of {len(rows)} rows of {rows}"
            if there:
                assert all(db.get(key) == value for key, value in rows.items()), what
        missing = {key: value for key, value in self.certain.items() if found.get(key) != value}
        assert not missing, f"{what}: lost {missing}"
        strange = found.keys() - self.certain.keys() - {key for rows in self.uncertain for key in rows}
        assert not strange, f"{what}: {strange} was never written"
        numbers = [row.seq for row in db.scan().rows()]
        groups = len(self.certain) + self.numbers_per_batch * len(self.uncertain)
        assert len(set(numbers)) <= groups, f"{what}: rows of two writes have one number"

    def write(self, rows: dict[bytes, bytes], *, durable: bool = False) -> None:
        batch = WriteBatch()
        for key, value in rows.items():
            batch.put(key, value)
        handle = self.db.write(batch)
        if durable:
            handle.wait(PATIENCE_S)


def put(world: World) -> None:
    ((key, value),) = world.uncertain[-1].items()
    world.db.put(key, value)


def put_durably(world: World) -> None:
    ((key, value),) = world.uncertain[-1].items()
    world.db.put(key, value, await_durable=True)


def write_batch(world: World) -> None:
    world.write(world.uncertain[-1])


def write_arrow(world: World) -> None:
    # In descending order: each row takes a sequence number of its own, and still none is visible without the others.
    world.numbers_per_batch = 3
    rows = sorted(world.uncertain[-1].items(), reverse=True)
    table = pa.table({"key": [key for key, _ in rows], "value": [value for _, value in rows]})
    world.db.write_arrow(table, await_durable=False)


def commit_transaction(world: World) -> None:
    with world.db.transaction("serializable") as transaction:
        transaction.get(b"before")
        for key, value in world.uncertain[-1].items():
            transaction.put(key, value)


def merge(world: World) -> None:
    ((key, value),) = world.uncertain[-1].items()
    world.db.merge(key, value)


def flush_wal(world: World) -> None:
    world.write(world.uncertain[-1])
    world.db.flush("wal")


def flush(world: World) -> None:
    world.write(world.uncertain[-1])
    world.db.flush()


def checkpoint(world: World) -> None:
    world.write(world.uncertain[-1])
    world.db.checkpoint(name="one")


def checkpoint_of_what_is_durable(world: World) -> None:
    world.write(world.uncertain[-1])
    world.db.checkpoint(scope="durable")


def adopt(world: World) -> None:
    world.write(world.uncertain[-1])
    world.db._engine.manifest.refresh()


def read_at_one_moment(world: World) -> None:
    world.write(world.uncertain[-1])
    with world.db.snapshot() as snapshot:
        list(snapshot.scan())


SMALL = {"l0_sst_size_bytes": 150, "max_unflushed_bytes": 400}

OPERATIONS: list[tuple[Callable[[World], None], int, dict[str, Any]]] = [
    (put, 1, {}),
    (put_durably, 1, {}),
    (put_durably, 1, {"synchronous_commit": True}),
    (merge, 1, {}),
    (write_batch, 3, {}),
    (write_arrow, 3, {}),
    (write_arrow, 3, {"synchronous_commit": True}),
    (commit_transaction, 3, {}),
    (write_batch, 3, SMALL),
    (write_batch, 3, {"max_wal_bytes": 100}),
    (write_batch, 3, {"wal_enabled": False}),
    (write_batch, 3, {"synchronous_commit": True}),
    (write_batch, 3, {"memory_budget": 64 << 20}),
    (flush, 3, {"memory_budget": 64 << 20}),
    (flush_wal, 3, {}),
    (flush, 3, {}),
    (flush, 3, {"wal_enabled": False}),
    (checkpoint, 3, {}),
    (checkpoint_of_what_is_durable, 3, {}),
    (adopt, 3, {}),
    (read_at_one_moment, 3, {}),
]


def name_of(case: tuple[Callable[[World], None], int, dict[str, Any]]) -> str:
    operation, _, options = case
    return "-".join((operation.__name__, *options))


@pytest.mark.parametrize("case", OPERATIONS, ids=name_of)
def test_an_exception_at_any_bytecode_of_an_operation_tears_no_batch_and_loses_no_durable_row(
    case: tuple[Callable[[World], None], int, dict[str, Any]],
) -> None:
    operation, rows, options = case
    for points, at in enumerate(strikes()):
        world = World(options)
        if prepare_and_strike(world, operation, rows, at):
            return_to_life(world)
        else:
            print(f"{name_of(case)}: {points} points struck of {at}")
            return


def prepare_and_strike(world: World, operation: Callable[[World], None], rows: int, at: int) -> bool:
    """Whether the operation was struck before it ended."""
    world.write({b"before": b"0"}, durable=True)
    world.certain[b"before"] = b"0"
    world.uncertain.append(world.group(rows))
    with Tracer(at) as tracer, suppress(Struck):
        operation(world)
    if not tracer.where:
        world.db.close()
        return False
    assert sys.exc_info() == (None, None, None), f"the strike at {tracer.where} is still being handled"
    world.check(world.db, f"struck at {tracer.where}")
    return True


def return_to_life(world: World) -> None:
    """Continue, crash, open, compare."""
    seen = all(world.db.get(key) == value for key, value in world.uncertain[0].items())
    after = world.group()
    world.write(after, durable=True)
    world.certain |= after
    if seen:
        # What was visible before a durable write is durable with it.
        world.certain |= world.uncertain[0]
    world.check(world.db, "after another write")
    crashed = copy_of(world.store)
    world.db.flush()
    world.check(world.db, "after a flush")
    world.db.close()
    for store, what in ((crashed, "after a crash"), (world.store, "after a close")):
        with world.open(store) as db:
            world.check(db, what)


@pytest.mark.parametrize("options", [{}, {"wal_enabled": False}], ids=["wal", "no-wal"])
def test_an_exception_at_any_bytecode_of_close_leaves_a_database_that_can_be_closed(
    options: dict[str, Any],
) -> None:
    for points, at in enumerate(strikes()):
        world = World(options)
        rows = world.group()
        world.write(rows)
        with Tracer(at) as tracer, suppress(Struck):
            world.db.close()
        if not tracer.where:
            print(f"close: {points} points struck of {at}")
            return
        # It takes writes, or refuses them; it does not lose them.
        with suppress(Closed):
            world.write({b"late": b"1"})
            world.certain[b"late"] = b"1"
        world.db.close()
        world.certain |= rows
        with world.open(copy_of(world.store)) as db:
            world.check(db, f"closed after {tracer.where}")


def test_an_exception_at_any_bytecode_of_a_put_or_delete_leaves_a_memory_store_that_lists_what_it_has() -> (
    None
):
    def change(store: MemoryStore) -> None:
        store.put("new", b"2")
        store.delete("old")
        store.put("old", b"3")

    for at in count():
        store = MemoryStore()
        store.put("old", b"1")
        with Tracer(at) as tracer, suppress(Struck):
            change(store)
        listed = [meta.path for meta in store.list("")]
        assert [store.head(path).path for path in listed] == listed
        change(store)
        assert [meta.path for meta in store.list("")] == ["new", "old"], tracer.where
        if not tracer.where:
            return


def test_an_exception_at_any_bytecode_of_an_upload_leaves_the_whole_sst_or_nothing(tmp_path: Path) -> None:
    rows = [(b"%05d" % number, 1, VALUE, b"v" * 1000, None, None) for number in range(400)]
    expected = encode_sst(rows)
    # The loops of interpreted kernels over every row are bytecode, too: millions of steps.
    for points, at in enumerate(strikes(STRIDE if COMPILED else 500 * STRIDE)):
        store, paths = LocalStore(tmp_path / str(at), fsync=False), DbPaths("db")

        def upload(store: LocalStore = store, paths: DbPaths = paths) -> None:
            with SstOutput(store, paths, lambda: Ulid(1)) as output:
                builder = SstBuilder(open_sink=output.open)
                builder.add_rows(rows)
                output.commit(builder.finish())

        with Tracer(at) as tracer, suppress(Struck):
            upload()
        found = [store.get(meta.path).data for meta in store.list("")]
        assert found in ([], [expected.data]), tracer.where
        if not tracer.where:
            print(f"upload: {points} points struck of {at}")
            return


def strikes(stride: int = STRIDE) -> Iterator[int]:
    """Where to strike, in ascending order, without an end."""
    at = random.Random(os.environ.get("INTERRUPT_SEED")).randrange(stride)
    while True:
        yield at
        at += stride
