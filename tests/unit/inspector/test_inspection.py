"""The documents that the page of `flagstone inspect` asks for."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, Settings
from flagstone.errors import InvalidRequest
from flagstone.format.sst_info import SsTableInfo
from flagstone.inspector.decoding import Decoder
from flagstone.inspector.documents import MAX_BARS, state_document
from flagstone.inspector.inspection import MAX_ROWS, Inspection
from flagstone.inspector.manifest_history import MAX_SAMPLES
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.operators import Concatenate
from flagstone.store.prices import S3_STANDARD
from flagstone.types import RunId, Ulid
from golden.corpus import GoldenDatabase, every_database
from kit.grown_database import grow
from kit.inspected import golden_place, inspected, place

QUIET = Settings(compactor_options=None, garbage_collector_options=None)
READS = {"get", "get_range", "head", "list"}


def asked(inspection: Inspection, name: str, **query: str) -> dict[str, Any]:
    found = inspection.answer(name, query)
    assert found is not None
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(3):
            db.put(b"user/1", b"value %d" % number)
            db.flush()
            if number == 1:
                db.checkpoint(name="second", lifetime=timedelta(hours=1))
        db.delete(b"user/1")
        db.put(b"user/2", b'{"name": "Ada"}')
    return folder


@every_database
def test_every_document_of_every_golden_database_is_answered_by_reads_alone(database: GoldenDatabase) -> None:
    where = golden_place(database)
    with inspected(where, Concatenate()) as inspection:
        state = asked(inspection, "state")
        drawn = [bar for tree in state["trees"] for lane in tree["lanes"] for bar in lane["bars"]]
        assert sum(bar["count"] for bar in drawn) == state["l0"] + state["run_ssts"]
        assert all(0 <= bar["x0"] <= bar["x1"] <= 1 for bar in drawn)
        history = asked(inspection, "history")
        assert asked(inspection, "state", manifest=str(history["first"]))["manifest"] == history["first"]
        assert asked(inspection, "sizes")["stored_bytes"] > 0
        inspection.live()
    assert set(where.store.totals()["requests"]) <= READS


def test_rows_come_in_pages_in_key_order(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        for number in range(7):
            db.put(b"a%d" % number, b"x")
        db.put(b"b", b"y")
    with inspected(place(tmp_path / "db")) as inspection:
        first = asked(inspection, "rows", prefix="a", limit="4")
        second = asked(inspection, "rows", prefix="a", limit="4", start=first["next"])
        assert [row["key"]["text"] for row in first["rows"] + second["rows"]] == [f"a{at}" for at in range(7)]
        assert second["next"] is None
        assert asked(inspection, "rows", prefix="0x62", form="auto")["rows"][0]["key"]["text"] == "b"


def test_a_key_shows_its_versions_its_tombstone_and_what_checkpoints_have(shop: Path) -> None:
    with inspected(place(shop)) as inspection:
        found = asked(inspection, "key", key="user/1")
    assert found["row"] is None
    assert [(each["kind"], each["value"] and each["value"]["text"]) for each in found["versions"]] == [
        ("tombstone", None),
        ("value", "value 2"),
        ("value", "value 1"),
        ("value", "value 0"),
    ]
    assert [(each["name"], each["row"]["value"]["text"]) for each in found["checkpoints"]] == [
        ("second", "value 1")
    ]


def test_versions_that_a_compaction_dropped_are_not_shown(shop: Path) -> None:
    Admin(shop).compact(full=True)
    with inspected(place(shop)) as inspection:
        versions = asked(inspection, "key", key="user/1")["versions"]
        assert "value 0" not in json.dumps(versions)
        assert asked(inspection, "key", key="user/2")["row"]["value"]["json"] == '{\n "name": "Ada"\n}'


def test_merge_operands_are_shown_also_without_their_operator(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET, merge_operator=Concatenate()) as db:
        db.put(b"j", b"x")
        db.put(b"k", b"a")
        db.merge(b"k", b"b")
    with inspected(place(tmp_path / "db")) as inspection:
        found = asked(inspection, "key", key="k")
        assert found["row"] is None
        assert "operator" in found["problem"]
        assert [each["kind"] for each in found["versions"]] == ["operand", "value"]
        rows = asked(inspection, "rows")["rows"]
        assert [(row["key"]["text"], row["value"] and row["value"]["text"]) for row in rows] == [
            ("j", "x"),
            ("k", None),
        ]
    with inspected(place(tmp_path / "db"), Concatenate()) as inspection:
        assert asked(inspection, "key", key="k")["row"]["value"]["text"] == "ab"


def test_rows_of_a_stored_schema_show_their_columns(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        orders = db.collection("orders", key=(str, int), value={"total": float, "note": str})
        orders["ada", 7] = {"total": 1.5, "note": "<b>"}
    with inspected(place(tmp_path / "db")) as inspection:
        [row] = asked(inspection, "rows")["rows"]
    columns = dict(row["value"]["columns"])
    assert columns["total"] == "1.5"
    assert columns["note"] == "<b>"
    assert "ada" in columns.values()
    assert "7" in columns.values()


def test_the_state_of_a_grown_database_shows_segments_lenders_and_the_running_compaction(
    tmp_path: Path,
) -> None:
    shop = grow(tmp_path, manifests=100)
    where = place(shop)
    with inspected(where) as inspection:
        state = asked(inspection, "state")
        orders, users = state["trees"]
        assert [lane["kind"] for lane in orders["lanes"]] == ["l0"] * 5 + ["run"] * 4
        assert [lane["busy"] for lane in orders["lanes"]] == [
            False,
            False,
            True,
            True,
            True,
            True,
            False,
            False,
            False,
        ]
        assert (orders["prefix"]["text"], users["prefix"]["text"]) == ("orders/", "users/")
        assert orders["lanes"][-1]["bars"][0]["borrowed"] == 1
        assert [lender["path"] for lender in state["lenders"]] == ["origin"]
        assert state["jobs"][0]["status"] == "running"
        assert state["jobs"][0]["worker"] == "worker-1"
        assert state["jobs"][0]["read_bytes"] > 0
        finished = [job for job in state["jobs"] if not job["active"]]
        assert [job["read_bytes"] for job in finished] == [None] * len(finished)  # its sources are gone
        assert finished
        before = where.requests
        history = asked(inspection, "history")
        assert history["count"] == state["manifest"]
        assert where.requests - before <= MAX_SAMPLES + 1
        before = where.requests
        asked(inspection, "history")
        assert where.requests - before == 1  # it lists what is new, and reads no manifest again
        former = asked(inspection, "state", manifest="2")
        assert (former["manifest"], former["former"], former["jobs"]) == (2, True, None)
        again = where.requests
        asked(inspection, "state", manifest="2")
        assert where.requests == again


def test_a_run_of_many_ssts_is_drawn_as_groups_of_neighbours() -> None:
    ssts = [
        SsTable(Ulid(at + 1), SsTableInfo(b"%06d" % at, b"%06d" % at, 0, 10, 0, 0))
        for at in range(2 * MAX_BARS + 5)
    ]
    run = SortedRun(RunId(3), tuple(SstView.whole(sst.id) for sst in ssts))
    manifest = Manifest(ssts={sst.id: sst for sst in ssts}, tree=Tree(runs=(run,)))
    [tree] = state_document(1, manifest, None, Decoder({}))["trees"]
    [lane] = tree["lanes"]
    assert len(lane["bars"]) <= MAX_BARS
    assert sum(bar["count"] for bar in lane["bars"]) == lane["ssts"] == len(ssts)
    assert lane["bars"][0]["first"]["text"] == "000000"
    assert lane["bars"][-1]["last"]["text"] == f"{len(ssts) - 1:06}"


def test_live_rates_count_what_was_written_between_two_looks(shop: Path) -> None:
    with inspected(place(shop)) as inspection:
        assert inspection.live()["rates"] == []
        with flagstone.open(shop, settings=QUIET) as db:
            db.put(b"k", b"v" * 1000, await_durable=True)
        inspection._samples[-1] = _older(inspection._samples[-1])
        rate = inspection.live()["rates"][-1]
        assert rate["wal_files"] > 0
        assert rate["dollars_a_month"] == pytest.approx(rate["puts"] * S3_STANDARD.put * 30 * 24 * 3600)


def _older(sample: Any) -> Any:
    from dataclasses import replace

    return replace(sample, at_ms=sample.at_ms - 10_000)


@pytest.mark.parametrize(
    ("name", "query", "words"),
    [
        ("state", {"manifest": "-1"}, "whole number"),
        ("state", {"manifest": "9" * 30}, "whole number"),
        ("state", {"manifest": "٣"}, "whole number"),
        ("rows", {"limit": str(MAX_ROWS + 1)}, "whole number"),
        ("rows", {"start": "xyz"}, "hexadecimal"),
        ("rows", {"prefix": "0xz"}, "hexadecimal"),
        ("rows", {"prefix": "[", "form": "tuple"}, "a tuple"),
        ("rows", {"prefix": '[{"a": 1}]', "form": "tuple"}, "not a tuple"),
        ("rows", {"prefix": "a", "form": "base64"}, "text, hex, tuple"),
        ("key", {"id": "zz"}, "hexadecimal"),
        ("key", {}, "key"),
    ],
)
def test_a_request_without_meaning_is_refused_with_advice(
    shop: Path, name: str, query: dict[str, str], words: str
) -> None:
    with inspected(place(shop)) as inspection, pytest.raises(InvalidRequest, match=words):
        inspection.answer(name, query)


def test_a_path_without_a_database_is_refused(tmp_path: Path) -> None:
    with inspected(place(tmp_path / "nothing")) as inspection:
        for name in ("state", "sizes", "rows", "key"):
            with pytest.raises(InvalidRequest):
                inspection.answer(name, {"key": "k"})
        assert inspection.answer("secrets", {}) is None
