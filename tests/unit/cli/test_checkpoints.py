"""Commands for checkpoints, clones, unions, restore, deletion and diff."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

import flagstone
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow

NOWHERE = "01740ee5-6459-44af-9a45-85deb6e468e3"


def test_a_checkpoint_is_created_refreshed_listed_and_deleted(shop: Flagstone) -> None:
    made = shop.json("create-checkpoint", "--name", "nightly", "--lifetime", "7days 30min")
    assert UUID(made["id"])
    assert made["name"] == "nightly"
    assert made["expire_time_secs"] - made["create_time_secs"] == (7 * 24 * 60 + 30) * 60

    again = shop.json("create-checkpoint", "-s", made["id"])
    assert again["manifest_id"] == made["manifest_id"]
    assert again["expire_time"] is None

    assert shop.json("refresh-checkpoint", "-i", made["id"])["expire_time"] is None
    assert [entry["id"] for entry in shop.json("list-checkpoints")] == [made["id"], again["id"]]
    assert [entry["id"] for entry in shop.json("list-checkpoints", "-n", "nightly")] == [made["id"]]
    assert "nightly" in shop.ok("list-checkpoints")

    assert shop.json("delete-checkpoint", "-i", made["id"]) == {
        "result": "success",
        "checkpoint_id": made["id"],
    }
    assert [entry["id"] for entry in shop.json("list-checkpoints")] == [again["id"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create-checkpoint", "--lifetime", "0s"), "at least one second"),
        (("create-checkpoint", "--lifetime", "soon"), "is not a duration"),
        (("create-checkpoint", "--source", NOWHERE), NOWHERE),
        (("create-checkpoint", "--source", "last"), "no checkpoint has the id or name"),
        (("refresh-checkpoint", "--id", NOWHERE), NOWHERE),
        (("delete-checkpoint", "--id", NOWHERE), NOWHERE),
        (("delete-checkpoint", "--id", "x"), "no checkpoint has the id or name"),
        (("clone", "copy", "--checkpoint", NOWHERE), NOWHERE),
        (("clone", "copy", "--prefix", "a", "--start", "b"), "not both"),
        (("clone", "shop"), "shop"),
        (("clone", "/elsewhere/copy"), "is not in file://"),
        (("union", "all", "missing"), "no database at 'missing'"),
        (("restore", "--id", NOWHERE, "--yes"), NOWHERE),
        (("delete-db", "--grace", "1h", "--confirm"), "add --soft"),
        (("diff", NOWHERE, NOWHERE), NOWHERE),
    ],
)
def test_bad_requests_change_nothing(shop: Flagstone, arguments: tuple[str, ...], words: str) -> None:
    before = shop.json("read-manifest")
    assert words in shop.refused(*arguments)
    assert shop.json("read-manifest") == before


def test_a_clone_has_the_rows_of_its_source(shop: Flagstone, tmp_path: Path) -> None:
    made = shop.json("clone", "copy")
    assert made["path"] == "copy"
    assert made["manifest"]["external_dbs"][0]["path"] == "shop"
    copy = tmp_path / "store" / "copy"
    shop.ok("put", "user/9", "later")
    assert shop.json("scan", "--count", path=copy)["entries"] == 10
    assert "borrowed" in shop.ok("stats", path=copy)


def test_the_path_of_a_clone_may_be_a_relative_folder(
    shop: Flagstone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "store")
    shop.ok("clone", "./near", path="./shop")
    shop.ok("clone", str(tmp_path / "store" / "far"))
    assert shop.json("scan", "--count", path="near") == shop.json("scan", "--count", path="far")


def test_the_union_of_two_projections_has_the_rows_of_their_source(shop: Flagstone, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shop.ok("clone", "users", "--prefix", "user/")
    shop.ok("clone", "rest", "--stop", "user/")
    assert shop.ok("scan", "--value", "none", path=store / "rest") == "0x00ff\n"
    assert shop.json("scan", "--count", path=store / "users")["entries"] == 9

    shop.ok("union", "whole", "users", path=store / "rest")

    assert shop.ok("scan", path=store / "whole") == shop.ok("scan")
    assert "overlap" in shop.refused("union", "twice", "users", path=store / "shop")


def test_restore_needs_yes_and_can_be_undone(shop: Flagstone) -> None:
    good = shop.json("create-checkpoint")["id"]
    shop.ok("delete", "user/1")

    assert "add --yes" in shop.refused("restore", "--id", good)
    assert "would be given up" in shop.ok("restore", "--id", good, "--dry-run")
    assert shop("get", "user/1").exit_code == 1

    done = shop.json("restore", "--id", good, "--yes", "--save", "before")
    assert shop.ok("get", "user/1") == "name 1"
    assert done["manifest_id"] == shop.json("read-manifest")["id"]

    shop.ok("restore", "--id", done["saved_checkpoint_id"], "--yes")
    assert shop("get", "user/1").exit_code == 1


def test_delete_db_without_confirm_only_prints_what_it_would_delete(shop: Flagstone) -> None:
    files = [file for file in shop.path.rglob("*") if file.is_file()]
    done = shop("delete-db")
    assert done.exit_code == 0
    assert "add --confirm" in done.stderr
    assert f"{len(files)} objects would be deleted" in done.stdout
    assert shop.json("delete-db", "--dry-run")["dry_run"] is True
    assert [file for file in shop.path.rglob("*") if file.is_file()] == files


def test_a_confirmed_deletion_leaves_the_residue_and_a_purge_leaves_nothing(shop: Flagstone) -> None:
    done = shop.json("delete-db", "--confirm")
    assert done["state"] == "due"
    left = {file.relative_to(shop.path.parent).as_posix() for file in shop.path.rglob("*") if file.is_file()}
    assert left == set(done["kept"])
    assert len(left) == 5
    assert "stays for at least" in shop.refused("purge-db", "--yes")
    assert set(shop.json("purge-db", "--yes", "--min-age", "0s")["deleted"]) == left
    assert not [file for file in shop.path.rglob("*") if file.is_file()]
    assert "no database at" in shop.refused("stats")


def test_a_database_with_a_clone_is_not_deleted(shop: Flagstone) -> None:
    shop.ok("clone", "copy")
    assert "live checkpoints" in shop.refused("delete-db", "--confirm")
    assert shop.json("scan", "--count")["entries"] == 10


def test_a_soft_deletion_has_a_due_time(shop: Flagstone) -> None:
    done = shop.json("delete-db", "--soft", "--grace", "7days", "--yes")
    assert done["due_time"] is not None
    assert "was destroyed" in shop.refused("get", "user/1")
    assert list(shop.path.rglob("*.sst"))


def test_diff_prints_added_removed_and_changed_keys(shop: Flagstone) -> None:
    with flagstone.open(shop.path) as database:
        before = str(database.checkpoint().id)
        database.put(b"user/1", b"renamed")
        database.delete(b"user/2")
        database.put(b"user/9", b"new")
        after = str(database.checkpoint().id)
    assert shop.ok("diff", before, after) == "~ user/1\trenamed\n- user/2\tname 2\n+ user/9\tnew\n"
    assert shop.ok("diff", before, after, "--value", "none", "--prefix", "user/2") == "- user/2\n"
    assert shop.json("diff", before, after, "--prefix", "user/1") == {
        "key": "user/1",
        "before": "name 1",
        "after": "renamed",
    }
    assert shop.ok("diff", after, after) == ""
