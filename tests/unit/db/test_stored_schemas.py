"""`Admin.schemas`: which schemas a database stores, whatever else it holds."""

from __future__ import annotations

from pathlib import Path

import flagstone
from flagstone import Admin, Settings
from flagstone.operators import Concatenate

QUIET = Settings(compactor_options=None, garbage_collector_options=None)


def test_schemas_are_read_without_the_merge_operator_that_other_rows_need(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET, merge_operator=Concatenate()) as db:
        db.merge(b"a", b"operand")
        db.collection("orders", key=(str,), value={"total": float})["ada"] = {"total": 1.5}
    assert list(Admin(tmp_path / "db").schemas()) == [b"Xorders\x00"]


def test_a_clone_of_a_key_range_has_the_schemas_of_its_range(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.collection("orders", key=(str,), value={"total": float})["ada"] = {"total": 1.5}
        db.put(b"z", b"1")
    admin = Admin(tmp_path / "db")
    admin.clone(tmp_path / "high", range=(b"p", None))
    admin.clone(tmp_path / "low", range=(None, b"p"))
    assert Admin(tmp_path / "high").schemas() == {}
    assert list(Admin(tmp_path / "low").schemas()) == list(admin.schemas())
