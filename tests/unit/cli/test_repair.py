"""`flagstone repair`: the plan, what it gives up, and `--apply`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flagstone
from flagstone import Settings
from unit.cli.running import Flagstone

QUIET = Settings(flush_interval=None, compactor_options=None, garbage_collector_options=None)


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def holed(cli: Flagstone) -> Flagstone:
    """A database after a crash, without the second of its three WAL files with rows."""
    db = flagstone.open(cli.path, settings=QUIET)
    for key in (b"a", b"b", b"c"):
        db.put(key, b"value")
        db.flush("wal")
    left = files(cli.path)
    db.close()
    for name in files(cli.path).keys() - left.keys():
        (cli.path / name).unlink()
    with_rows = sorted(name for name, data in left.items() if name.startswith("wal/") and data)
    (cli.path / with_rows[1]).unlink()
    return cli


@pytest.mark.slow
def test_a_sound_database_is_not_touched(shop: Flagstone) -> None:
    before = files(shop.path)
    assert "nothing to repair" in shop.ok("repair")
    assert "nothing to repair" in shop.ok("repair", "--apply", "--yes")
    assert shop.json("repair")["defects"] == []
    assert files(shop.path) == before


def test_without_apply_nothing_changes_and_the_exit_code_is_six(holed: Flagstone) -> None:
    before = files(holed.path)

    done = holed("repair")

    assert done.exit_code == 6
    assert "wal hole" in done.stdout
    assert "gives up: the rows of the missing files" in done.stdout
    assert "--apply" in done.stdout
    assert files(holed.path) == before


@pytest.mark.slow
def test_apply_repairs_and_a_second_repair_finds_nothing(holed: Flagstone) -> None:
    out = holed.ok("repair", "--apply", "--yes")

    assert "repaired: manifest" in out
    assert holed.json("repair")["sound"] is True
    assert holed.ok("verify")
    assert [line.split("\t")[0] for line in holed.ok("scan").splitlines()] == ["a", "c"]


def test_apply_needs_a_confirmation_or_yes(holed: Flagstone) -> None:
    before = files(holed.path)
    done = holed("repair", "--apply")
    assert done.exit_code == 2
    assert "this gives up the rows of the missing files" in done.stderr
    assert "--yes" in done.stderr
    assert files(holed.path) == before


def test_json_has_the_whole_report(holed: Flagstone) -> None:
    plan = json.loads(holed("repair", "--json").stdout)
    assert (plan["sound"], plan["applied"]) == (False, False)
    assert [defect["kind"] for defect in plan["defects"]] == ["wal hole"]
    assert plan["gives_up"]["sequences"] == [[2, 2]]

    report = holed.json("repair", "--apply", "--yes")

    assert (report["sound"], report["applied"]) == (True, True)
    assert report["gives_up"] == plan["gives_up"]


def test_a_defect_without_a_remedy_exits_with_six(shop: Flagstone) -> None:
    sst = next((shop.path / "compacted").iterdir())
    sst.write_bytes(sst.read_bytes()[:20])
    done = shop("repair", "--apply", "--yes")
    assert done.exit_code == 6
    assert "damaged sst" in done.stdout
    assert "an operator must examine it" in done.stdout


def test_repair_of_a_missing_database_is_a_bad_request(cli: Flagstone) -> None:
    assert "no database" in cli.refused("repair")
