"""The scan of a single source, without a merge, returns the same rows as an ordinary scan."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, CorruptData, Settings
from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.scan import FlagstoneReader, single_source
from flagstone.store.paths import DbPaths
from flagstone.types import KeyRange
from kit.databases import QUIET, Append
from kit.spark_loads import load, pairs

COLUMNS = ("key", "value", "seq", "created_ms", "expires_ms")


def read(folder: Path, **options: str) -> list[tuple[Any, ...]]:
    chosen = {"path": str(folder), "columns": ",".join(COLUMNS), **options}
    reader = FlagstoneReader(hold_checkpoint(parse_read_options(chosen)), read_schema(COLUMNS))
    return [
        tuple(row[name] for name in COLUMNS)
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def scanned(folder: Path, *, include_expired: bool = False, **options: Any) -> list[tuple[Any, ...]]:
    with flagstone.open_reader(folder, mode="latest", **options) as reader:
        rows = reader.scan(include_expired=include_expired).rows()
        return [(row.key, row.value, row.seq, row.created_ms, row.expires_ms) for row in rows]


def has_single_source(folder: Path) -> bool:
    return single_source(Admin(folder).manifest().value, KeyRange(), DbPaths(folder.name)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, "Lz4"])
@pytest.mark.parametrize("partitions", ["1", "4"])
def test_the_fast_path_returns_the_same_rows_as_the_merging_path(
    tmp_path: Path, codec: Any, partitions: str
) -> None:
    folder, chance = tmp_path / "db", random.Random(11)
    db = flagstone.open(folder, settings=QUIET, merge_operator=Append())
    held = []
    for turn in range(4):
        for _ in range(600):
            key = b"k%04d" % chance.randrange(900)
            match chance.randrange(5):
                case 0:
                    db.delete(key)
                case 1:
                    db.merge(key, b"+%d" % turn)
                case 2:
                    db.put(key, b"short", ttl=timedelta(milliseconds=1))
                case 3:
                    db.put(key, b"long" * chance.randrange(200), ttl=timedelta(hours=1))
                case _:
                    db.put(key, b"%d" % turn)
        held.append(db.snapshot())  # keeps old versions
        db.flush()
    work = CompactionWorkerOptions(max_sst_size=30_000, compression_codec=codec)
    Admin(folder).compact(full=True, options=CompactorOptions(worker=work), merge_operator=Append())
    for snapshot in held:
        snapshot.close()
    db.close()
    assert has_single_source(folder)
    operator = {"merge_operator": f"{Append.__module__}:Append"}

    assert read(folder, partitions=partitions, **operator) == scanned(folder, merge_operator=Append())
    assert read(folder, include_expired="true", **operator) == scanned(
        folder, include_expired=True, merge_operator=Append()
    )
    middle = [row for row in scanned(folder, merge_operator=Append()) if b"k02" <= row[0] < b"k05"]
    assert read(folder, start="k02", stop="k05", **operator) == middle


def test_a_range_covered_by_one_sst_uses_the_fast_path(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"a%d" % number: b"1" for number in range(9)})])
    load(folder, [pairs({b"b%d" % number: b"2" for number in range(9)} | {b"a5": b"2"})])
    manifest, paths = Admin(folder).manifest().value, DbPaths("db")

    assert single_source(manifest, KeyRange(), paths) is None
    assert single_source(manifest, KeyRange(b"a0", b"a9"), paths) is None
    assert single_source(manifest, KeyRange(b"c", None), paths) == []
    alone = single_source(manifest, KeyRange(b"b", None), paths)
    assert alone is not None
    assert [part.keys for part in alone] == [KeyRange(b"b", b"b8\0")]
    for partitions in ("1", "3"):
        assert read(folder, partitions=partitions) == scanned(folder)


def test_a_damaged_sst_raises_corrupt_data_with_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"k%d" % number: b"v" * 50 for number in range(900)})])
    [sst] = (folder / "compacted").iterdir()
    stored = sst.read_bytes()
    sst.write_bytes(stored[:5000] + bytes([stored[5000] ^ 1]) + stored[5001:])

    with pytest.raises(CorruptData, match=sst.name):
        read(folder)


def test_an_empty_database_has_no_rows(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    flagstone.open(folder, settings=Settings(compactor_options=None)).close()

    assert read(folder) == []
