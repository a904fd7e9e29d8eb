"""`read-manifest`, `list-manifests`, `seq-to-ts` and `ts-to-seq`."""

from __future__ import annotations

import json

import pytest

import flagstone
from golden.corpus import GoldenDatabase, databases
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow


def test_read_manifest_prints_the_whole_manifest(shop: Flagstone) -> None:
    manifest = shop.json("read-manifest")
    sst = manifest["l0"][0]["sst"]

    assert manifest["id"] == len(shop.json("list-manifests"))
    assert manifest["initialized"] is True
    assert manifest["last_l0_seq"] == 10
    assert manifest["compacted"] == manifest["segments"] == manifest["checkpoints"] == []
    assert [sst["info"]["first_entry"], sst["info"]["last_entry"]] == ["0x00ff", "user/8"]
    assert manifest["l0"][1]["sst"]["info"]["first_entry"] == "user/0"
    assert (shop.path / "compacted" / f"{sst['id']}.sst").exists()


def test_read_manifest_reads_the_manifest_with_the_given_id(shop: Flagstone) -> None:
    assert shop.json("read-manifest", "--id", "1")["last_l0_seq"] == 0
    assert shop.json("read-manifest", "-i", "1")["id"] == 1
    assert "no manifest 99" in shop.refused("read-manifest", "--id", "99")


def test_manifests_are_listed_from_start_to_before_end(shop: Flagstone) -> None:
    assert [entry["id"] for entry in shop.json("list-manifests", "-s", "2", "-e", "4")] == [2, 3]
    assert shop.json("list-manifests", "--start", "2")[0]["id"] == 2
    assert (
        shop.json("list-manifests", "--end", "2")[0]["location"]
        == "shop/manifest/00000000000000000001.manifest"
    )
    assert shop.ok("list-manifests", "--start", "99") == "no manifests in that range\n"


def test_list_manifests_without_json_reads_no_manifest(shop: Flagstone) -> None:
    for file in (shop.path / "manifest").iterdir():
        file.write_bytes(b"damaged")
    assert "00000" not in shop.ok("list-manifests")
    assert shop("list-manifests", "--json").exit_code == 6


@pytest.mark.parametrize("database", databases(), ids=lambda database: database.name)
def test_read_manifest_works_for_every_golden_database(database: GoldenDatabase) -> None:
    cli = Flagstone(database.store / database.path)
    manifest = cli.json("read-manifest")
    text = cli.ok("read-manifest")

    for view in [*manifest["l0"], *(view for run in manifest["compacted"] for view in run["sst_views"])]:
        assert view["sst"]["id"] in text
    for checkpoint in manifest["checkpoints"]:
        assert checkpoint["id"] in text
    for external in manifest["external_dbs"]:
        assert external["path"] in text
    assert cli.json("list-manifests")[-1]["id"] == manifest["id"]


def test_seq_to_ts_and_ts_to_seq_invert_each_other(shop: Flagstone) -> None:
    ends = shop.json("read-manifest")["sequence_tracker"]
    found = shop.json("seq-to-ts", "999")

    assert found == {"seq": 999, "ts": ends["last"]["time"], "ts_secs": ends["last"]["time_secs"]}
    assert shop.ok("seq-to-ts", "999") == f"{ends['last']['time']}\n"
    assert shop.ok("ts-to-seq", str(found["ts_secs"])) == f"{ends['last']['seq']}\n"
    assert shop.ok("ts-to-seq", ends["last"]["time"]) == f"{ends['last']['seq']}\n"
    assert shop.json("ts-to-seq", "0", "--round", "up")["seq"] == ends["first"]["seq"]


@pytest.mark.parametrize(
    "arguments",
    [("ts-to-seq", "0"), ("seq-to-ts", "999", "--round", "up"), ("ts-to-seq", "2100-01-01", "--round", "UP")],
)
def test_an_unknown_time_or_sequence_number_exits_with_one(
    shop: Flagstone, arguments: tuple[str, ...]
) -> None:
    assert "the manifest has no" in shop.refused(*arguments, code=1)
    done = shop(*arguments, "--json")
    assert done.exit_code == 1
    assert list(json.loads(done.stdout).values()) == [None]


def test_ts_to_seq_refuses_a_text_that_is_not_a_time(shop: Flagstone) -> None:
    assert "is not a time" in shop.refused("ts-to-seq", "yesterday")


def test_as_of_reads_an_earlier_state_by_sequence_number_and_time(cli: Flagstone) -> None:
    with flagstone.open(cli.path) as database:
        database.put(b"k", b"old")
        checkpoint = database.checkpoint()
        database.put(b"k", b"new")
    assert cli.ok("get", "k") == "new"
    assert cli.ok("get", "k", "--as-of", "1", "--checkpoint", str(checkpoint.id)) == "old"
    assert cli.ok("get", "k", "--as-of", "1") == "old"
    assert cli.ok("scan", "--as-of", "0s ago") == "k\tnew\n"
    assert "has not come yet" in cli.refused("scan", "--as-of", "2100-01-01T00:00:00Z")
    assert "sequence number" in cli.refused("get", "k", "--as-of", "10 years ago")
    assert "is not a time" in cli.refused("get", "k", "--as-of", "long")
    assert "is not a duration" in cli.refused("get", "k", "--as-of", "long ago")
