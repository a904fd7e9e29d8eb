"""The state that a DataFrame shows: checkpoints that loads share, that tasks renew, or that a read does without."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest, Unavailable
from flagstone.db.reader.pinned import PinnedState
from flagstone.runtime.clock import VirtualClock
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.held_state import CheckpointRead, hold_checkpoint
from flagstone.spark.options import ReadOptions, parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.scan import FlagstoneReader
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET
from kit.spark_loads import load, pairs

LIFETIME = timedelta(minutes=10)


def options_of(folder: Path, **options: str) -> ReadOptions:
    return parse_read_options({"path": str(folder), **options})


def names_of(folder: Path) -> list[str | None]:
    return [each.name for each in Admin(folder).checkpoints() if each.manifest_id]


def rows_of(held: CheckpointRead) -> dict[bytes, bytes]:
    reader = FlagstoneReader(held, read_schema(("key", "value")))
    rows = [row for part in reader.plan() for batch in reader.read(part) for row in batch.to_pylist()]
    return {row["key"]: row["value"] for row in rows}


def shared(folder: Path) -> list[Any]:
    return Admin(folder).checkpoints("spark read")


def test_loads_of_one_state_share_a_checkpoint_and_a_new_state_gets_another(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"a": b"1"})])

    assert len({hold_checkpoint(options_of(folder)).checkpoint for _ in range(40)}) == 1
    assert len(shared(folder)) == 1
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"b", b"2")
        db.flush("wal")
        newer = hold_checkpoint(options_of(folder))
        assert rows_of(newer) == {b"a": b"1", b"b": b"2"}
        assert hold_checkpoint(options_of(folder)).checkpoint == newer.checkpoint
        db.put(b"b", b"3")
        db.flush("wal")
        assert rows_of(hold_checkpoint(options_of(folder))) == {b"a": b"1", b"b": b"3"}
        assert rows_of(newer) == {b"a": b"1", b"b": b"2"}
    assert len(shared(folder)) == 3


def test_a_checkpoint_of_one_frame_is_not_shared(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"a": b"1"})])

    owned = hold_checkpoint(options_of(folder), owned=True)
    loaded = hold_checkpoint(options_of(folder))

    assert owned.checkpoint != loaded.checkpoint
    assert not owned.renewed
    assert loaded.renewed
    assert hold_checkpoint(options_of(folder), owned=True).checkpoint != owned.checkpoint


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def options(clock: VirtualClock) -> ReadOptions:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET, clock=clock) as db:
        db.put(b"a", b"1")
    return ReadOptions(DatabaseAddress("db", store, clock=clock), lifetime=LIFETIME)


def expires_in(options: ReadOptions, clock: VirtualClock) -> float:
    [held] = options.address.admin().checkpoints("spark read")
    assert held.expires_s is not None
    return held.expires_s - clock.now_ms() / 1000


def test_a_task_renews_the_checkpoint_when_half_of_its_life_is_over(
    options: ReadOptions, clock: VirtualClock
) -> None:
    held = hold_checkpoint(options)
    reader = FlagstoneReader(held, read_schema(("key",)))
    [part] = reader.plan()

    clock.advance(4 * 60_000)
    list(reader.read(part))
    assert expires_in(options, clock) == 6 * 60
    clock.advance(2 * 60_000)
    list(reader.read(part))
    assert expires_in(options, clock) == 10 * 60
    clock.advance(11 * 60_000)
    list(reader.read(part))  # expired, and not yet collected
    assert expires_in(options, clock) == 10 * 60


def test_a_load_renews_the_checkpoint_that_it_shares(options: ReadOptions, clock: VirtualClock) -> None:
    first = hold_checkpoint(options)
    clock.advance(6 * 60_000)

    assert hold_checkpoint(options).checkpoint == first.checkpoint
    assert expires_in(options, clock) == 10 * 60
    clock.advance(11 * 60_000)
    assert hold_checkpoint(options).checkpoint != first.checkpoint


def test_a_checkpoint_of_the_user_is_not_renewed(options: ReadOptions, clock: VirtualClock) -> None:
    own = options.address.admin().create_checkpoint(timedelta(minutes=10), name="mine")
    held = hold_checkpoint(replace(options, checkpoint=str(own.id)))
    clock.advance(6 * 60_000)

    reader = FlagstoneReader(held, read_schema(("key",)))
    assert [batch.num_rows for part in reader.plan() for batch in reader.read(part)] == [1]
    [after] = options.address.admin().checkpoints("mine")
    assert after.expires_s == own.expires_s


def test_a_latest_snapshot_shows_one_moment_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"a": b"1"})])
    db = flagstone.open(folder, settings=QUIET)
    db.put(b"b", b"2")
    db.flush("wal")
    before = names_of(folder)
    with monkeypatch.context() as refused:

        def put(*_: object, **__: object) -> None:
            raise AssertionError("a read without a checkpoint wrote an object")

        for name in ("put", "put_if_absent", "put_if_match", "upload"):
            refused.setattr(LocalStore, name, put)
        held = hold_checkpoint(options_of(folder, snapshot="latest"))
        assert rows_of(held) == {b"a": b"1", b"b": b"2"}
    db.put(b"c", b"3")
    db.flush("wal")

    assert rows_of(held) == {b"a": b"1", b"b": b"2"}
    assert held.checkpoint is None
    again = hold_checkpoint(options_of(folder, snapshot="latest", state=str(held.pinned)))
    assert rows_of(again) == {b"a": b"1", b"b": b"2"}
    assert names_of(folder) == before
    db.close()


@pytest.mark.parametrize(("lost", "runs"), [("compacted", 1), ("compacted", 2), ("manifest", 1)])
def test_a_read_without_a_checkpoint_that_is_too_slow_says_so(tmp_path: Path, lost: str, runs: int) -> None:
    folder = tmp_path / "db"
    for number in range(runs):  # with several, the rows are merged
        load(folder, [pairs({b"a": b"%d" % number})])
    held = hold_checkpoint(options_of(folder, snapshot="latest"))
    reader = FlagstoneReader(held, read_schema(("key", "value")))
    parts = reader.plan()
    if lost == "manifest":
        load(folder, [pairs({b"a": b"2"})])
    for path in (folder / lost).iterdir():  # as garbage collection would
        if lost == "compacted" or int(path.stem) == (held.pinned or PinnedState.parse("0:0")).manifest_id:
            path.unlink()

    with pytest.raises(Unavailable, match=r"no checkpoint kept it|snapshot 'latest' has no checkpoint"):
        list(chain.from_iterable(map(reader.read, parts)))


def test_a_former_state_is_read_without_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
        db.put(b"a", b"2")
        db.flush("wal")
        before = names_of(folder)
        assert rows_of(hold_checkpoint(options_of(folder, as_of="1", snapshot="latest"))) == {b"a": b"1"}
        assert names_of(folder) == before


@pytest.mark.parametrize("text", ["", "17", "17:x", "x:17"])
def test_a_malformed_state_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="17:230"):
        PinnedState.parse(text)
