"""`stats`: the figures agree with the objects."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

import flagstone
from flagstone.inspector.text import size_text, time_text
from golden.corpus import GoldenDatabase, databases
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow


def test_stats_counts_the_objects_of_a_small_database(shop: Flagstone) -> None:
    stats = shop.json("stats")
    files = [file for file in shop.path.rglob("*") if file.is_file()]
    ssts = [file for file in files if file.parent.name == "compacted"]

    assert stats["path"] == "shop"
    assert stats["last_l0_seq"] == 10
    assert stats["trees"] == [
        {"prefix": "", "l0": {"count": 2, "bytes": stats["trees"][0]["l0"]["bytes"]}, "runs": []}
    ]
    assert stats["tables"]["live"] == {"count": 2, "bytes": sum(file.stat().st_size for file in ssts)}
    assert stats["tables"]["unreferenced"] == {"count": 0, "bytes": 0}
    assert sum(folder["count"] for folder in stats["objects"].values()) == len(files)
    assert sum(folder["bytes"] for folder in stats["objects"].values()) == sum(
        file.stat().st_size for file in files
    )
    assert stats["requests"] == {"get": 2, "list": 2}


def test_stats_counts_pinned_and_unreferenced_ssts(shop: Flagstone) -> None:
    with flagstone.open(shop.path) as database:
        database.checkpoint(name="keep")
        database.checkpoint(lifetime=timedelta(seconds=60))
    orphan = shop.path / "compacted" / "01ARZ3NDEKTSV4RRFFQ69G5FAV.sst"
    shutil.copy(next((shop.path / "compacted").iterdir()), orphan)

    stats = shop.json("stats")

    assert stats["checkpoints"] == {"total": 2, "named": 1, "permanent": 1, "expired": 0}
    assert stats["tables"]["live"]["count"] == 2
    assert stats["tables"]["unreferenced"] == {"count": 1, "bytes": orphan.stat().st_size}


@pytest.mark.parametrize("database", databases(), ids=lambda database: database.name)
def test_stats_works_for_every_golden_database(database: GoldenDatabase) -> None:
    wal_store = () if database.wal_store is None else ("--wal-store", str(database.wal_store))
    cli = Flagstone(database.store / database.path)
    stats = cli.json(*wal_store, "stats")
    text = cli.ok(*wal_store, "stats")

    found = stats["tables"]
    borrowed = {external["path"] for external in stats["external_dbs"] if external["tables"]}
    assert (found["borrowed"]["count"] > 0) == bool(borrowed)
    assert (
        found["live"]["count"] + found["pinned"]["count"] + found["unreferenced"]["count"]
        == stats["objects"].get("compacted", {"count": 0})["count"]
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["manifest", str(stats["manifest_id"])] in lines
    for folder, weight in stats["objects"].items():
        assert [folder, str(weight["count"]), *size_text(weight["bytes"]).split()] in lines
    assert stats["space_amplification"] is None or stats["space_amplification"] >= 1


def test_stats_does_not_count_the_ssts_of_a_database_inside_this_one(shop: Flagstone) -> None:
    before = shop.json("stats")
    flagstone.open(shop.path / "inner").close()
    stats = shop.json("stats")
    assert stats["objects"]["manifest"] == before["objects"]["manifest"]
    assert stats["objects"]["inner/manifest"]["count"] > 0
    assert stats["tables"] == before["tables"]
    assert stats["log"] == before["log"]


def test_stats_of_a_missing_database_is_a_bad_request(cli: Flagstone, tmp_path: Path) -> None:
    assert "no database at" in cli.refused("stats")
    assert not (tmp_path / "store").exists()


def test_sizes_have_binary_units_and_times_are_rfc_3339() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 1536, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 GiB",
    ]
    assert time_text(0) == "1970-01-01T00:00:00Z"
    assert time_text(1.5) == "1970-01-01T00:00:01.500Z"
    assert time_text(None) is None
    assert time_text(-(2.0**62)) is None
