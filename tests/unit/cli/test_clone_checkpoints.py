"""Clones on the command line, and the final checkpoints that keep their SSTs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow


def final(shop: Flagstone, name: str = "flagstone.clone/copy") -> str:
    (found,) = shop.json("list-checkpoints", "--name", name)
    return str(found["id"])


def test_a_second_clone_to_the_same_path_is_a_bad_request(shop: Flagstone) -> None:
    shop.ok("clone", "copy")
    assert "there is a finished clone at 'copy'" in shop.refused("clone", "copy")


def test_a_checkpoint_that_a_clone_needs_is_deleted_only_with_force(shop: Flagstone) -> None:
    shop.ok("clone", "copy")
    id_ = final(shop)
    for command in (
        ("delete-checkpoint", "--id", id_),
        ("refresh-checkpoint", "--id", id_, "--lifetime", "1h"),
    ):
        assert "the clone at 'copy' borrows SSTs of 'shop'" in shop.refused(*command)
        assert final(shop) == id_
    shop.ok("delete-checkpoint", "--id", id_, "--force")
    assert shop.json("list-checkpoints", "--name", "flagstone.clone/copy") == []


def test_deleting_a_copied_clone_reports_the_checkpoint_that_is_kept(shop: Flagstone, tmp_path: Path) -> None:
    shop.ok("clone", "copy")
    shutil.copytree(tmp_path / "store" / "copy", tmp_path / "store" / "stray")
    output = shop.ok("delete-db", "--confirm", path=str(tmp_path / "store" / "stray"))
    assert f"not released: the checkpoint {final(shop)} of 'shop' is kept for the clone at 'copy'" in output
    assert shop.json("delete-db", "--confirm", path=str(tmp_path / "store" / "copy"))["unreleased"] == []
    assert shop.json("list-checkpoints", "--name", "flagstone.clone/copy") == []


def test_reads_outside_of_a_projection_are_bad_requests(shop: Flagstone, tmp_path: Path) -> None:
    shop.ok("clone", "part", "--start", "user/", "--stop", "user0")
    part = str(tmp_path / "store" / "part")
    for command in (("get", "zzz"), ("scan", "--prefix", "zzz"), ("scan", "--from", "v")):
        refusal = shop.refused(*command, path=part)
        assert "outside the writable range of this clone, b'user/' up to b'user0'" in refusal
    shop.ok("scan", path=part)
