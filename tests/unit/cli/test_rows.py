"""`get`, `put`, `delete` and `scan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flagstone
from unit.cli.running import Flagstone


def test_get_returns_the_bytes_that_put_wrote(cli: Flagstone) -> None:
    value = bytes(range(256))
    cli.ok("put", "--create", "blob", "-", stdin=value)

    done = cli("get", "blob")

    assert done.exit_code == 0
    assert done.stdout_bytes == value


def test_put_reads_the_value_from_a_file(cli: Flagstone, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(b"\x89PNG\r\n")
    cli.ok("put", "--create", "picture", f"@{file}")
    assert cli("get", "picture").stdout_bytes == b"\x89PNG\r\n"


@pytest.mark.slow
def test_put_accepts_values_in_hexadecimal_and_base64(cli: Flagstone) -> None:
    cli.ok("put", "--create", "a", "0x0001", "--value-form", "hex")
    cli.ok("put", "b", "AAE=", "--value-form", "base64")
    assert cli("get", "a").stdout_bytes == cli("get", "b").stdout_bytes == b"\x00\x01"


def test_get_of_a_missing_key_exits_with_one_and_prints_nothing(shop: Flagstone) -> None:
    done = shop("get", "missing")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "flagstone: no value for the key missing\n"


@pytest.mark.slow
def test_a_key_with_0x_is_text_and_the_error_hints_at_hex(shop: Flagstone) -> None:
    assert "--hex" in shop("get", "0x00ff").stderr
    assert shop("get", "--hex", "0x00ff").stdout_bytes == b"\x01\x02"
    assert shop("get", "--hex", "00FF").stdout_bytes == b"\x01\x02"
    assert shop("get", "--base64", "AP8=").stdout_bytes == b"\x01\x02"


def test_json_of_a_row_has_its_sequence_number_and_times(cli: Flagstone) -> None:
    cli.ok("put", "--create", "k", "v", "--ttl", "7days 30min")
    row = cli.json("get", "k")
    assert row["key"] == "k"
    assert row["value"] == "v"
    assert row["seq"] == 1
    assert row["expires_ms"] - row["created_ms"] == (7 * 24 * 60 + 30) * 60_000


def test_json_of_a_missing_key_is_null(shop: Flagstone) -> None:
    done = shop("get", "missing", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) is None


@pytest.mark.slow
def test_delete_removes_a_key(shop: Flagstone) -> None:
    assert shop.json("delete", "user/3") == {"key": "user/3", "seq": 11}
    assert shop("get", "user/3").exit_code == 1


def test_put_without_create_does_not_create_a_database(cli: Flagstone) -> None:
    assert "no database" in cli.refused("put", "k", "v")
    assert not cli.path.exists()


def test_put_keeps_the_other_rows(shop: Flagstone) -> None:
    shop.ok("put", "user/9", "name 9")
    with flagstone.open_reader(shop.path, mode="latest") as reader:
        assert len(list(reader.scan(prefix=b"user/"))) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("get", "--hex", "xyz"), "the key 'xyz' is not hexadecimal"),
        (("get", "--base64", "!"), "the key '!' is not base64"),
        (("get", "--hex", "--base64", "00"), "exclude each other"),
        (("get", ""), "key"),
        (("put", "k", "@/nowhere/at/all"), "cannot read the value from /nowhere/at/all"),
        (("put", "k", "v", "--ttl", "7 fortnights"), "unknown unit 'fortnights'"),
        (("scan", "--prefix", "a", "--from", "b"), "not both"),
        (("scan", "--start", "b", "--stop", "a"), "inverted"),
        (("scan", "--from", "0xzz"), "the start '0xzz' is not hexadecimal"),
        (("scan", "--checkpoint", "yesterday"), "list-checkpoints shows both"),
        (("get", "k", "--checkpoint", "01740ee5-6459-44af-9a45-85deb6e468e3"), "no checkpoint"),
        (("get", "k", "--merge-operator", "sum"), "no merge operator 'sum'"),
        (("get", "k", "--merge-operator", "nowhere:Sum"), "cannot load the merge operator nowhere:Sum"),
        (("get", "k", "--merge-operator", "json:loads"), "has no method merge"),
    ],
)
def test_the_error_for_bad_arguments_is_one_line_that_says_what_to_do(
    shop: Flagstone, arguments: tuple[str, ...], words: str
) -> None:
    assert words in shop.refused(*arguments)


def test_scan_prints_one_key_and_value_per_line(shop: Flagstone) -> None:
    lines = shop.ok("scan").splitlines()
    assert lines[0] == "0x00ff\t<binary 2 bytes>"
    assert lines[1:] == [f"user/{number}\tname {number}" for number in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "users"),
    [
        (("--prefix", "user/"), range(9)),
        (("--start", "user/3", "--stop", "user/5"), range(3, 5)),
        (("--from", "user/3", "--to", "user/5"), range(3, 5)),
        (("--from", "0x757365722f37"), range(7, 9)),
        (("--prefix", "user/", "--limit", "2"), range(2)),
        (("--prefix", "user/", "--max-keys", "2"), range(2)),
        (("--prefix", "user/", "--reverse", "--limit", "3"), range(8, 5, -1)),
        (("--hex", "--prefix", "757365722f"), range(9)),
        (("--prefix", "missing"), range(0)),
    ],
)
def test_scan_prints_the_rows_of_the_given_range(
    shop: Flagstone, arguments: tuple[str, ...], users: range
) -> None:
    lines = shop.ok("scan", *arguments, "--json").splitlines()
    assert [json.loads(line)["value"] for line in lines] == [f"name {number}" for number in users]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--value", "hex"), "0x00ff\t0x0102"),
        (("--value", "len"), "0x00ff\t2 bytes"),
        (("--value", "none"), "0x00ff"),
        (("--value", "base64"), "0x00ff\tAQI="),
        (("--key", "base64", "--value", "utf8"), "AP8=\t\x01\x02"),
        (("--key", "utf8", "--value", "none"), "\x00\ufffd"),
    ],
)
def test_scan_prints_keys_and_values_in_the_given_form(
    shop: Flagstone, arguments: tuple[str, ...], line: str
) -> None:
    assert shop.ok("scan", "--limit", "1", *arguments).rstrip("\n") == line


def test_scan_with_count_prints_rows_and_bytes(shop: Flagstone) -> None:
    assert shop.ok("scan", "--count") == f"10 entries, {9 * 12 + 4} bytes\n"
    assert shop.json("scan", "--count") == {"entries": 10, "bytes": 9 * 12 + 4}


@pytest.mark.slow
def test_scan_shows_expired_rows_only_with_include_expired(cli: Flagstone) -> None:
    cli.ok("put", "--create", "k", "v", "--ttl", "1ms")
    assert cli.ok("scan") == ""
    assert cli.ok("scan", "--include-expired") == "k\tv\n"
    assert cli("get", "k").exit_code == 1
    assert cli("get", "k", "--include-expired").exit_code == 0


@pytest.mark.slow
def test_scan_reads_the_state_of_a_checkpoint(shop: Flagstone) -> None:
    with flagstone.open(shop.path) as database:
        checkpoint = str(database.checkpoint().id)
        database.put(b"user/9", b"late")
    assert "user/9" in shop.ok("scan")
    assert "user/9" not in shop.ok("scan", "--checkpoint", checkpoint)
    assert shop("get", "user/9", "--checkpoint", checkpoint).exit_code == 1


@pytest.mark.slow
def test_merge_operands_are_combined_by_the_given_operator(cli: Flagstone) -> None:
    from flagstone.lsm.operators import Concatenate

    with flagstone.open(cli.path, merge_operator=Concatenate()) as database:
        database.merge(b"k", b"a")
        database.merge(b"k", b"b")
    assert cli("get", "k").exit_code == 2
    assert cli.ok("get", "k", "--merge-operator", "concatenate") == "ab"
    assert cli.ok("scan", "--merge-operator", "flagstone.lsm.operators:Concatenate") == "k\tab\n"


@pytest.mark.slow
def test_reading_commands_write_nothing(shop: Flagstone) -> None:
    before = sorted(shop.path.rglob("*"))
    shop.ok("get", "user/1")
    shop.ok("scan")
    shop.ok("stats")
    shop.ok("verify")
    assert sorted(shop.path.rglob("*")) == before


def test_delete_shows_what_a_range_holds_and_deletes_it(cli: Flagstone) -> None:
    cli.ok("put", "--create", "a", "1")
    with flagstone.open(cli.path) as db:
        for number in range(300):
            db.put(b"k%03d" % number, b"v")
    refused = cli("delete", "--prefix", "k1")
    assert refused.exit_code != 0
    assert "100 rows" in refused.stderr
    assert "--yes" in refused.stderr
    shown = cli.json("delete", "--from", "k050", "--to", "k250", "--yes")
    assert (shown["from"], shown["to"], shown["rows"], shown["ssts"]) == ("k050", "k250", 200, 1)
    assert cli.ok("scan", "--prefix", "k", "--count").split()[0] == "100"
    assert "nothing was there" in cli.ok("delete", "--prefix", "k1", "--yes")


@pytest.mark.parametrize(
    "arguments",
    [(), ("a", "--prefix", "b"), ("--prefix", "b", "--from", "a"), ("--from", "b", "--to", "a", "--yes")],
)
def test_delete_without_one_meaning_is_refused(shop: Flagstone, arguments: tuple[str, ...]) -> None:
    before = shop.ok("scan", "--count")
    assert shop("delete", *arguments).exit_code != 0
    assert shop.ok("scan", "--count") == before
