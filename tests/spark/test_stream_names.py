"""Two queries with one consumer name: each delivers every change, or ends with an error that names the cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from kit.databases import QUIET
from kit.spark_loads import load, pairs
from spark.test_stream_source import follow, stream_of

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def put(folder: Path, *keys: bytes) -> None:
    """Write the keys, each in a WAL file, and flush them to SSTs, so that garbage collection may delete the files."""
    with flagstone.open(folder, settings=QUIET) as db:
        for key in keys:
            db.put(key, b"1", await_durable=True)
        db.flush()


def collect(folder: Path) -> None:
    Admin(folder).collect_garbage(min_age=timedelta())


def test_of_two_queries_with_one_name_the_slower_delivers_everything_while_the_wal_is_there(
    folder: Path,
) -> None:
    put(folder, b"a")
    slow, fast = stream_of(folder), stream_of(folder)
    _, at = follow(slow)
    put(folder, b"b", b"c")
    follow(fast)
    put(folder, b"d")

    rows, _ = follow(slow, at)

    assert [row["key"] for row in rows] == [b"b", b"c", b"d"]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_of_two_queries_with_one_name_the_slower_says_that_its_changes_are_gone(
    folder: Path, restarted: bool, more: bool
) -> None:
    put(folder, b"a")
    slow, fast = stream_of(folder), stream_of(folder)
    _, at = follow(slow)
    put(folder, b"b", b"c")
    follow(fast)
    fast.stop()
    collect(folder)
    if more:
        put(folder, b"d")
        collect(folder)

    with pytest.raises(InvalidRequest, match=r"Another query with the consumer name 'test' has read further"):
        follow(stream_of(folder) if restarted else slow, at)


def test_a_bulk_load_that_is_kept_for_the_faster_query_only_is_not_skipped_by_the_slower(
    folder: Path,
) -> None:
    put(folder, b"a")
    slow, fast = stream_of(folder), stream_of(folder)
    _, at = follow(slow)
    load(folder, [pairs({b"b": b"1"})])
    put(folder, b"c")
    follow(fast)
    fast.stop()
    for held in Admin(folder).loads():  # as after a quarter of an hour
        Admin(folder).delete_checkpoint(held.id)

    with pytest.raises(InvalidRequest, match=r"by a bulk load that .* was not kept for this consumer"):
        follow(slow, at)


def test_the_error_of_a_single_query_whose_changes_are_gone_names_no_other_query(folder: Path) -> None:
    put(folder, b"a")
    reader = stream_of(folder)
    _, at = follow(reader)
    with flagstone.open(folder, settings=replace(QUIET, wal_enabled=False)) as db:
        db.put(b"b", b"1")
        db.flush()

    with pytest.raises(InvalidRequest, match="are not in the WAL") as raised:
        follow(reader, at)
    assert "consumer name" not in str(raised.value)
