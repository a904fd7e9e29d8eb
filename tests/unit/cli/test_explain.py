"""`explain` on a closed database."""

from __future__ import annotations

import flagstone
from flagstone.lsm.operators import Counter
from unit.cli.running import Flagstone


def test_it_names_the_source_and_the_requests(shop: Flagstone) -> None:
    shown = shop.ok("explain", "user/1")
    assert shown.startswith("user/1: a value of 6 B, sequence number 2\n")
    assert "value, sequence number 2" in shown
    assert "L0 01" in shown
    assert "per million" in shown
    found = shop.json("explain", "user/1")
    assert found["row"]["value"] == "name 1"
    answers = [step for step in found["steps"] if step["answers"]]
    assert [(step["source"], step["level"], step["versions"]) for step in answers] == [("SST", "L0", 1)]
    assert found["bytes"] == sum(step["fetched_bytes"] for step in found["steps"]) > 0
    assert found["dollars"] == found["requests"] * 0.0004 / 1000
    assert found["opening"]["requests"] >= 3


def test_rows_of_the_wal_need_no_request(shop: Flagstone) -> None:
    with flagstone.open(shop.path) as database:
        database.put(b"user/1", b"newer", await_durable=True)
        found = shop.json("explain", "user/1")
        assert (found["requests"], found["steps"][0]["source"], found["steps"][0]["answers"]) == (
            0,
            "memtable",
            True,
        )
        assert "$0.00 per million" in shop.ok("explain", "user/1")


def test_missing_deleted_and_former_keys_have_different_answers(shop: Flagstone) -> None:
    assert "no source has it" in shop.ok("explain", "nobody")
    seq = shop.json("get", "user/1")["seq"]
    shop.ok("create-checkpoint", "--name", "before")
    shop.ok("delete", "user/1")
    assert "the newest row is a tombstone" in shop.ok("explain", "user/1")
    former = shop.json("explain", "user/1", "--checkpoint", "before")
    assert former["row"]["seq"] == seq
    assert "is not hexadecimal" in shop.refused("explain", "--hex", "zz")


def test_sorted_runs_are_named(shop: Flagstone) -> None:
    shop.ok("compact", "--full")
    assert any(str(step["level"]).startswith("run ") for step in shop.json("explain", "user/1")["steps"])


def test_merge_operands_are_counted(cli: Flagstone) -> None:
    with flagstone.open(cli.path, merge_operator=Counter()) as database:
        database.merge(b"hits", Counter.encode(1))
        database.flush()
    found = cli.json("explain", "hits", "--merge-operator", "counter")
    assert any(step["outcome"].startswith("merge operand") for step in found["steps"])
