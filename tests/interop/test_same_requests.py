"""Edge cases: the wheel and Flagstone both accept or both refuse a request, and read the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flagstone
import flagstone.aio
from flagstone import Admin, InvalidRequest, WriteBatch
from flagstone.lsm.operators import Concatenate, Counter
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET

LAST_MS = 2**63 - 1


def test_both_refuse_a_merge_without_an_operator_at_once(wheel: Any, tmp_path: Path) -> None:
    for how in ("db", "transaction", "batch"):
        assert "merge operator missing" in wheel.refusal_of_merge(str(tmp_path), how)
    db = flagstone.open("db", store=MemoryStore(), settings=QUIET)
    transaction = db.transaction()
    for merge in (db.merge, transaction.merge):
        with pytest.raises(InvalidRequest, match="no merge operator"):
            merge(b"k", b"v")
    # A refused write is not part of the transaction.
    transaction.put(b"a", b"1")
    transaction.commit()
    assert dict(db.scan()) == {b"a": b"1"}
    batch = WriteBatch()
    batch.merge(b"k", b"v")
    with pytest.raises(InvalidRequest, match="no merge operator"):
        db.write(batch)
    db.close()

    async def in_async() -> None:
        async with (
            await flagstone.aio.open("db", store=MemoryStore(), settings=QUIET) as other,
            other.transaction() as tx,
        ):
            with pytest.raises(InvalidRequest, match="no merge operator"):
                await tx.merge(b"k", b"v")

    asyncio.run(in_async())


def test_a_transaction_refuses_an_operand_that_the_operator_refuses() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET, merge_operator=Counter()) as db:
        transaction = db.transaction()
        with pytest.raises(InvalidRequest, match="is not a counter"):
            transaction.merge(b"k", b"x")
        transaction.commit()
        assert dict(db.scan()) == {}


def test_both_refuse_a_wal_flush_when_the_wal_is_disabled(wheel: Any, tmp_path: Path) -> None:
    assert "WAL is disabled" in wheel.refusal_of_wal_flush(str(tmp_path))
    with flagstone.open("db", store=MemoryStore(), settings=QUIET.replace(wal_enabled=False)) as db:
        db.put(b"k", b"v")
        with pytest.raises(InvalidRequest, match=r"wal_enabled is False; use flush\('memtable'\)"):
            db.flush("wal")
        db.flush()


@pytest.mark.parametrize("name", [None, "", "x", "other"])
def test_both_list_the_same_checkpoints_for_a_name(wheel: Any, tmp_path: Path, name: str | None) -> None:
    folder = str(tmp_path)
    wheel.apply(folder, "db", [("put", b"k", b"v"), ("flush", "memtable")])
    admin = Admin("db", store=LocalStore(tmp_path))
    for given in (None, "x", "", None):
        admin.create_checkpoint(name=given)
    theirs = wheel.named_checkpoints(folder, "db", name)
    assert [held.name for held in admin.checkpoints(name)] == theirs
    assert len(theirs) == {None: 4, "": 3, "x": 1, "other": 0}[name]


@pytest.mark.parametrize("moment", [2**62, 2**62 + 1, LAST_MS - 1, LAST_MS])
def test_both_accept_the_latest_expiry_of_the_format(wheel: Any, tmp_path: Path, moment: int) -> None:
    store = LocalStore(tmp_path)
    with flagstone.open("ours", store=store, settings=QUIET) as db:
        db.put(b"k", b"v", expire_at=moment)
        row = db.get_row(b"k", include_expired=True)
        assert row is not None
        assert row.expires_ms == moment
    assert wheel.expiry_of(str(tmp_path), "ours", b"k") == moment
    wheel.put_expiring(str(tmp_path), "theirs", b"k", moment)
    with flagstone.open_reader("theirs", store=store, mode="latest") as reader:
        row = reader.get_row(b"k", include_expired=True)
        assert row is not None
        assert row.expires_ms == moment


@pytest.mark.parametrize("ttl_ms", [LAST_MS, LAST_MS - 1_800_000_000_000])
def test_a_default_ttl_beyond_the_last_time_means_no_expiry(ttl_ms: int) -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET.replace(default_ttl_millis=ttl_ms)) as db:
        db.put(b"k", b"v")
        row = db.get_row(b"k")
        assert row is not None
        assert row.expires_ms is None or row.expires_ms > 2**62
        db.flush()
        assert db.get(b"k") == b"v"


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except InvalidRequest:
        return True
    return False


def test_both_refuse_a_batch_with_two_expiries_of_one_key(wheel: Any, tmp_path: Path) -> None:
    assert wheel.refuses_ttls(str(tmp_path), [3_600_000, 7_200_000])
    assert not wheel.refuses_ttls(str(tmp_path), [3_600_000, 3_600_000])
    with flagstone.open("db", store=MemoryStore(), settings=QUIET, merge_operator=Concatenate()) as db:
        for second, refused in (("2h", True), ("60min", False)):
            batch = WriteBatch()
            batch.merge(b"k", b"1", ttl="1h")
            batch.merge(b"k", b"2", ttl=second)
            assert _refused(lambda batch=batch: db.write(batch)) is refused  # type: ignore[misc]


def test_the_wheel_refuses_a_reader_without_the_extractor_and_flagstone_reads(
    wheel: Any, tmp_path: Path
) -> None:
    wheel.apply(str(tmp_path), "db", [("put", b"aaa1", b"v"), ("flush", "memtable")], segments=True)
    assert "segment extractor configuration mismatch" in wheel.refusal_of_reader(str(tmp_path), "db")
    with flagstone.open_reader("db", store=LocalStore(tmp_path), mode="latest") as reader:
        assert dict(reader.scan()) == {b"aaa1": b"v"}
