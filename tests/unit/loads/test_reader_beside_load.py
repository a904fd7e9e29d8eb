"""A reader that has read the manifest before a bulk load, and the WAL after it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import pyarrow as pa
import pytest

import flagstone
from flagstone import ReaderSettings
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectMeta
from flagstone.testing.faults import FaultyStore
from kit.databases import QUIET, eventually

ATTENTIVE = QUIET.replace(manifest_poll_interval=timedelta(milliseconds=50))
RARELY = ReaderSettings(manifest_poll_interval=timedelta(hours=1), checkpoint_lifetime=timedelta(hours=2))


class BeforeSearch(FaultyStore):
    """Lets another process act before the reader looks for the end of the WAL, when it has read the manifest."""

    armed = False

    def __init__(self, inner: MemoryStore, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._act = act

    def head(self, path: str) -> ObjectMeta:
        if self.armed and "/wal/" in path:
            self.armed = False
            self._act()
        return super().head(path)


def load(memory: MemoryStore, rows: dict[bytes, bytes]) -> None:
    address = DatabaseAddress("db", store=memory)
    plan = begin_load(address)
    options = WriteOptions(address)
    batch = pa.RecordBatch.from_pydict({"key": list(rows), "value": list(rows.values())})
    commit_load(plan, options, write_ssts([batch], plan, options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["latest", "managed"])
@pytest.mark.parametrize("opened_before", [False, True])
def test_a_reader_shows_no_later_write_without_the_load(
    mode: Literal["latest", "managed"], opened_before: bool
) -> None:
    memory = MemoryStore()
    with flagstone.open("db", store=memory, settings=ATTENTIVE) as db:
        eventually(lambda: any("flagstone/writer" in meta.path for meta in memory.list("db")))
        db.put(b"a", b"old", await_durable=True)

        def act() -> None:
            load(memory, {b"a": b"loaded"})
            db.put(b"b", b"later", await_durable=True)

        store = BeforeSearch(memory, act)
        store.armed = not opened_before
        with flagstone.open_reader("db", store=store, mode=mode, settings=RARELY) as reader:
            if opened_before:
                assert dict(reader.scan()) == {b"a": b"old"}
                store.armed = True
                reader.refresh()
            assert not store.armed
            assert dict(reader.scan()) == {b"a": b"loaded", b"b": b"later"}
