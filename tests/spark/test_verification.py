"""A verification on Spark has the same report as a local one, for sound and for damaged databases."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.format.sst_info import SstType
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.jobs.verification import SparkChecker, plan_shares, verify
from flagstone.verification.ssts import Subject
from golden.corpus import DATA, databases
from kit.databases import QUIET
from kit.spark_loads import on_spark


@pytest.mark.long
@on_spark
def test_spark_reports_golden_databases_as_a_local_verification_does(spark: Any) -> None:
    for database in databases():
        stores = {"store": str(database.store)}
        if database.wal_store is not None:
            stores["wal_store"] = str(database.wal_store)
        assert verify(spark, database.path, **stores, tasks=2) == Admin(database.path, **stores).verify()


@pytest.mark.long
@on_spark
def test_spark_reports_every_kind_of_damage_as_a_local_verification_does(spark: Any, tmp_path: Path) -> None:
    chance = random.Random(7)
    for number, source in enumerate(("compaction", "crash", "checkpoints", "gc", "basic") * 2):
        folder = tmp_path / f"{number}"
        shutil.copytree(DATA / source, folder)
        damaged = [file for file in sorted((folder / "db").rglob("*.sst")) if file.stat().st_size > 10]
        for file in chance.sample(damaged, min(2, len(damaged))):
            how = chance.randrange(3)
            if how == 0:
                file.unlink()
                continue
            data = bytearray(file.read_bytes())
            if how == 1:
                data[chance.randrange(len(data))] ^= 1 + chance.randrange(255)
            file.write_bytes(data if how == 1 else data[: chance.randrange(len(data))])

        ours = verify(spark, "db", store=str(folder), tasks=3)

        expected = Admin("db", store=str(folder)).verify()
        assert ours == expected
        assert ours.findings
        assert ours.to_dict() == expected.to_dict()


@on_spark
def test_spark_verifies_a_separate_wal_store_and_ssts_of_a_lender(spark: Any, tmp_path: Path) -> None:
    main, wal = str(tmp_path / "main"), str(tmp_path / "wal")
    with flagstone.open("db", store=main, wal_store=wal, settings=QUIET) as db:
        for number in range(500):
            db.put(b"%04d" % number, b"v")
        db.flush()
        db.put(b"only in the WAL", b"v", await_durable=True)
    Admin("db", store=main, wal_store=wal).clone("copy")
    for path in ("db", "copy"):
        ours = verify(spark, path, store=main, wal_store=wal)
        assert ours == Admin(path, store=main, wal_store=wal).verify()
        assert ours.ok
        assert ours.rows >= 500


@on_spark
def test_the_summary_says_what_was_read_and_how_fast(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with flagstone.open(tmp_path / "shop", settings=QUIET) as db:
        db.put(b"a", b"1")
    caplog.set_level(logging.INFO, "flagstone.spark")
    report = verify(spark, tmp_path / "shop")
    assert report.seconds > 0
    [line] = [record.getMessage() for record in caplog.records if record.name == "flagstone.spark"]
    assert line.startswith("verified database=shop ok=True findings=0 ")
    assert f"bytes={report.bytes} " in line
    assert "mb_per_s=" in line


@on_spark
def test_a_database_that_cannot_be_verified_raises(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no database"):
        verify(spark, tmp_path / "nothing")
    nowhere = SparkChecker(spark, DatabaseAddress("", store=str(tmp_path)))
    with pytest.raises(InvalidRequest, match="names a whole store"):
        nowhere.check([Subject("compacted/x.sst", SstType.COMPACTED, 1)])


@given(sizes=st.lists(st.integers(0, 10**9), max_size=60), count=st.integers(1, 20))
def test_the_shares_of_the_tasks_contain_every_object_once_and_are_about_even(
    sizes: list[int], count: int
) -> None:
    shares = plan_shares(sizes, count)

    assert sorted(at for share in shares for at in share) == list(range(len(sizes)))
    assert len(shares) == min(count, len(sizes))
    assert all(shares)
    if shares:
        cost = [size + 64 * 1024 for size in sizes]
        heaviest = max(sum(cost[at] for at in share) for share in shares)
        assert heaviest <= sum(cost) / len(shares) + max(cost)
