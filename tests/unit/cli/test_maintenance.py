"""Compaction and garbage collection on the command line."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

import flagstone
from flagstone.cli.compaction import newest_codec
from flagstone.cli.documents import plan_request
from flagstone.cli.garbage import GcSchedule, parse_schedule, plan_schedule
from flagstone.errors import InvalidRequest
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, DrainSpec, TieredSpec
from flagstone.metadata.manifest import Manifest, Segment
from flagstone.runtime.ids import parse_ulid
from flagstone.types import RunId
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow

ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


def test_a_full_compaction_creates_one_sorted_run(shop: Flagstone) -> None:
    before = shop.ok("scan")
    done = shop.json("compact", "--full")
    assert len(done["jobs"]) == 1
    assert done["bytes_read"] > 0
    manifest = shop.json("read-manifest")
    assert manifest["l0"] == []
    assert len(manifest["compacted"]) == 1
    assert shop.ok("scan") == before
    assert shop.ok("compact") == "nothing to compact\n"

    file = shop.json("read-compactions")
    job = file["recent_compactions"][-1]
    assert (job["id"], job["status"], job["active"]) == (done["jobs"][0], "Completed", False)
    assert shop.json("read-compaction", "--id", job["id"]) == job
    assert shop.json("read-compaction", "-i", job["id"], "--compactions-id", str(file["id"])) == job
    assert [entry["id"] for entry in shop.json("list-compactions")] == list(range(1, file["id"] + 1))
    assert [entry["id"] for entry in shop.json("list-compactions", "-s", "2", "-e", "3")] == [2]
    assert job["id"] in shop.ok("read-compactions")
    assert job["id"] in shop.ok("read-compaction", "-i", job["id"])


def test_a_compaction_uses_the_codec_of_the_newest_sst(cli: Flagstone, tmp_path: Path) -> None:
    with flagstone.open(cli.path, settings=flagstone.Settings(compression_codec="Zstd")) as database:
        for round_ in range(2):
            database.put(b"k", b"v" * 1000 + b"%d" % round_)
            database.flush()
    cli.ok("compact", "--full")
    assert (
        cli.json("read-manifest")["compacted"][0]["sst_views"][0]["sst"]["info"]["compression_codec"]
        == "Zstd"
    )

    settings = tmp_path / "SlateDb.json"
    settings.write_text('{"compression_codec": "Lz4"}')
    cli.ok("put", "k2", "v")
    cli.ok("--settings", str(settings), "compact", "--full", "--patience", "0s")
    assert (
        cli.json("read-manifest")["compacted"][0]["sst_views"][0]["sst"]["info"]["compression_codec"] == "Lz4"
    )


def test_without_ssts_there_is_no_newest_codec() -> None:
    assert newest_codec(Manifest()) is None


def test_a_submitted_request_waits_for_a_coordinator(shop: Flagstone) -> None:
    assert "no coordinator was ever started" in shop.refused("submit-compaction", "--request", '"Full"')
    shop.ok("compact", "--full")
    shop.ok("put", "user/9", "name 9")
    jobs = shop.json("submit-compaction", "--request", '"Full"')
    assert [job["status"] for job in jobs] == ["Submitted"]
    assert len(jobs[0]["spec"]["sources"]) == 2
    assert shop.json("read-compaction", "--id", jobs[0]["id"]) == jobs[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("read-compactions",), "no coordinator was ever started"),
        (("read-compaction", "--id", ULID), "no coordinator was ever started"),
        (("read-compaction", "--id", "x"), "ULID 'x'"),
        (("compact", "--full", "--segment", "eu/"), "there is no segment b'eu/'"),
        (("compact", "--deadline", "soon"), "is not a duration"),
        (("run-garbage-collection", "--min-age", "long"), "is not a duration"),
        (("schedule-garbage-collection",), "at least one of"),
        (("schedule-garbage-collection", "--wal", "1h"), "is not min_age=DURATION,period=DURATION"),
        (("schedule-garbage-collection", "--wal", "min_age=1h,period=0s"), "use a duration above zero"),
        (("schedule-garbage-collection", "--detach", "period=0s"), "use a duration above zero"),
    ],
)
def test_bad_requests_are_refused(shop: Flagstone, arguments: tuple[str, ...], words: str) -> None:
    assert words in shop.refused(*arguments)


@pytest.mark.parametrize("command", ["compact", "run-compactor", "run-worker", "run-garbage-collection"])
def test_maintenance_of_a_missing_database_is_a_bad_request(cli: Flagstone, command: str) -> None:
    done = cli(command)
    assert done.exit_code == 2, done.stderr
    assert not cli.path.exists()


def view(number: int) -> SstView:
    return SstView.whole(parse_ulid(f"{ULID[:-1]}{number}"))


TREE = Tree((view(2), view(1)), (SortedRun(RunId(3), (view(0),)),))
MANIFEST = Manifest(tree=TREE, segments=(Segment(b"eu/", Tree((view(4), view(3)))),))


@pytest.mark.parametrize(
    ("request_", "specs"),
    [
        (
            "Full",
            [
                TieredSpec((view(2).id, view(1).id), (RunId(3),), RunId(3)),
                TieredSpec((view(4).id, view(3).id), (), RunId(4), b"eu/"),
            ],
        ),
        ({"FullSegment": {"segment": "eu/"}}, [TieredSpec((view(4).id, view(3).id), (), RunId(4), b"eu/")]),
        (
            {"FullSegment": {"segment": [101, 117, 47]}},
            [TieredSpec((view(4).id, view(3).id), (), RunId(4), b"eu/")],
        ),
        (
            {"FullSegment": {"segment": "0x65752f"}},
            [TieredSpec((view(4).id, view(3).id), (), RunId(4), b"eu/")],
        ),
        (
            {"Spec": {"sources": [{"SortedRun": 3}, {"Sst": ULID}], "destination": 7}},
            [TieredSpec((parse_ulid(ULID),), (RunId(3),), RunId(7))],
        ),
        (
            {"Spec": {"Tiered": {"segment": [], "sources": [{"SstView": ULID}], "destination": 0}}},
            [TieredSpec((parse_ulid(ULID),), (), RunId(0))],
        ),
        (
            {"Spec": {"DrainSegment": {"segment": "eu/", "sources": [{"SstView": ULID}]}}},
            [DrainSpec(b"eu/", (parse_ulid(ULID),))],
        ),
    ],
)
def test_requests_become_compaction_specs(request_: object, specs: list[TieredSpec]) -> None:
    assert plan_request(json.dumps(request_), MANIFEST, Compactions()) == specs


@pytest.mark.parametrize(
    "text",
    [
        "Full",
        '"Some"',
        "[]",
        "{}",
        '{"FullSegment": {}}',
        '{"FullSegment": {"segment": "us/"}}',
        '{"FullSegment": {"segment": [256]}}',
        '{"FullSegment": {"segment": 1.5}}',
        '{"Spec": {}}',
        '{"Spec": {"sources": [3], "destination": 0}}',
        '{"Spec": {"sources": [{"SortedRun": true}], "destination": 0}}',
        '{"Spec": {"sources": [{"SstView": "x"}], "destination": 0}}',
        '{"Spec": {"sources": [{"SortedRun": 3}]}}',
        '{"Spec": {"sources": [{"SortedRun": 3}], "destination": -1}}',
        '{"Spec": {"sources": []}, "Full": 1}',
    ],
)
def test_an_invalid_request_raises_invalid_request(text: str) -> None:
    with pytest.raises(InvalidRequest):
        plan_request(text, MANIFEST, Compactions())


def test_garbage_is_reported_then_deleted(shop: Flagstone) -> None:
    kept = {"-m", "0s"}
    dry = shop.json("run-garbage-collection", "--dry-run", *sorted(kept))
    assert dry["kinds"]["manifest"]["deleted"] > 0
    assert dry["kinds"]["manifest"]["dry_run"] is True
    manifests = len(shop.json("list-manifests"))
    assert "only reported" in shop.ok("run-garbage-collection", "--dry-run", "--min-age", "0s")

    done = shop.json("run-garbage-collection", "--resource", "manifest", "--min-age", "1ms")
    assert list(done["kinds"]) == ["manifest"]
    assert done["result"] == "success"
    assert len(shop.json("list-manifests")) == manifests - done["kinds"]["manifest"]["deleted"]
    assert shop.json("scan", "--count")["entries"] == 10
    assert shop.json("verify")["ok"] is True


def test_garbage_younger_than_min_age_stays(shop: Flagstone) -> None:
    assert shop.json("run-garbage-collection")["kinds"]["manifest"]["deleted"] == 0
    assert shop.json("run-garbage-collection", "-m", "24h")["kinds"]["manifest"]["deleted"] == 0


def test_boundary_files_can_be_disabled(shop: Flagstone) -> None:
    shop.ok("run-garbage-collection", "-r", "manifest", "-m", "0s", "--disable-boundary-files")
    assert not list(shop.path.rglob("*.boundary"))
    shop.ok("put", "k", "v")
    shop.ok("run-garbage-collection", "-r", "manifest", "-m", "0s")
    assert [file.name for file in shop.path.rglob("*.boundary")] == ["manifest.boundary"]


def test_schedules_are_parsed_as_in_slatedb() -> None:
    found = parse_schedule("wal", "min_age=10m,period=1m,ignored=5m")
    assert found == GcSchedule(timedelta(minutes=10), timedelta(minutes=1))
    options = plan_schedule({"wal": found, "wal_fence": found}, timedelta(hours=1), boundary_files=False)
    assert options.wal_options is not None
    assert (options.wal_options.min_age, options.wal_options.interval) == found
    assert options.wal_fence_options is not None
    assert options.wal_fence_options.dry_run is False
    assert options.detach_options is not None
    assert options.manifest_options is options.compacted_options is options.compactions_options is None
    assert options.boundary_files_enabled is False
