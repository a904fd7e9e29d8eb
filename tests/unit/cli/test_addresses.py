"""How a call names its database, a checkpoint and a moment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner, Result

from flagstone.cli.main import app
from flagstone.cli.parsing import parse_as_of, parse_moment
from flagstone.errors import InvalidRequest
from unit.cli.running import Flagstone


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def path(shop: Flagstone, quiet_environment: Callable[..., None]) -> str:
    quiet_environment()
    return str(shop.path)


def test_the_database_comes_before_the_command_after_it_or_as_the_first_argument(path: str) -> None:
    calls = [
        ("--path", path, "get", "user/1"),
        ("get", "--path", path, "user/1"),
        ("get", "user/1", "-p", path),
        ("get", path, "user/1"),
        ("get", path, "--hex", b"user/1".hex()),
    ]
    assert {run(*call).stdout for call in calls} == {"name 1"}
    assert {run(*call).stdout for call in (("scan", path), ("scan", "--limit", "99", path))} == {
        run("-p", path, "scan").stdout
    }
    assert run("stats", path).exit_code == 0
    assert run("run-garbage-collection", path, "--dry-run").exit_code == 0


def test_an_argument_may_equal_the_database(path: str) -> None:
    assert run("put", path, path, path).exit_code == 0
    assert run("get", path, path).stdout == path


def test_the_environment_names_the_database_unless_the_call_does(
    path: str, quiet_environment: Callable[..., None]
) -> None:
    quiet_environment(FLAGSTONE_PATH=path)
    assert run("get", "user/1").stdout == "name 1"
    quiet_environment(FLAGSTONE_PATH="/nowhere/shop")
    assert run("get", path, "user/1").stdout == "name 1"
    assert run("-p", path, "get", "user/1").stdout == "name 1"
    assert run("get", "-p", path, "user/1").stdout == "name 1"


def test_no_database_and_two_databases_are_refused(path: str) -> None:
    missing = run("get", "user/1")
    assert (missing.exit_code, "no database given" in missing.stderr) == (2, True)
    two = run("-p", path, "get", "-p", "other", "user/1")
    assert (two.exit_code, "two databases are named" in two.stderr) == (2, True)
    assert run("-p", path, "stats", "other").exit_code == 2


def test_commands_take_checkpoints_by_name(shop: Flagstone) -> None:
    first = shop.json("create-checkpoint", "--name", "nightly")["id"]
    shop.ok("put", "user/1", "changed")
    assert shop.ok("get", "user/1", "--checkpoint", "nightly") == "name 1"
    assert shop.json("scan", "--checkpoint", "nightly", "--count")["entries"] == 10
    shop.ok("create-checkpoint", "--name", "later")
    assert shop.ok("diff", "nightly", "later").startswith("~ user/1")
    shop.ok("clone", "copy", "--checkpoint", "nightly")
    assert shop.ok("get", "user/1", path=shop.path.parent / "copy") == "name 1"
    copied = shop.json("create-checkpoint", "--source", "nightly", "--name", "weekly")
    assert copied["manifest_id"] == shop.json("list-checkpoints", "--name", "nightly")[0]["manifest_id"]
    shop.ok("refresh-checkpoint", "--id", "weekly", "--lifetime", "1day")
    shop.ok("delete-checkpoint", "--id", "weekly")
    shop.ok("restore", "--id", "nightly", "--yes")
    assert shop.ok("get", "user/1") == "name 1"
    assert first in str(shop.json("list-checkpoints"))


def test_of_several_checkpoints_with_a_name_reads_take_the_newest_and_changes_refuse(shop: Flagstone) -> None:
    first = shop.json("create-checkpoint", "--name", "nightly")["id"]
    shop.ok("put", "user/1", "changed")
    second = shop.json("create-checkpoint", "--name", "nightly")["id"]
    shop.ok("delete", "user/1")
    assert shop.ok("get", "user/1", "--checkpoint", "nightly") == "changed"
    for command in ("delete-checkpoint", "refresh-checkpoint", "restore"):
        refusal = shop.refused(command, "--id", "nightly")
        assert first in refusal
        assert second in refusal
    shop.ok("delete-checkpoint", "--id", second)
    assert shop.ok("get", "user/1", "--checkpoint", "nightly") == "name 1"


def test_a_time_is_written_in_one_way_everywhere(shop: Flagstone) -> None:
    now = datetime.now(UTC)
    assert parse_moment("2026-11-16T03:00:00Z") == parse_moment("2026-11-16") + timedelta(hours=3)
    assert parse_moment("@1794798585") == parse_moment("1794798585") == parse_as_of("@1794798585")
    assert parse_as_of("1794798585") == 1794798585
    assert abs(parse_moment("2h ago") - (now - timedelta(hours=2))) < timedelta(seconds=30)
    assert abs(parse_moment("now") - now) < timedelta(seconds=30)
    for text in ("soon", "@", "2h"):
        with pytest.raises(InvalidRequest, match="is not a time"):
            parse_moment(text)
    assert shop.ok("ts-to-seq", "now") == shop.ok("ts-to-seq", "0s ago")
