from __future__ import annotations

import json

import pytest

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.schema import Column, GivenColumns, TableSchema, plan_evolution, schema_key

NESTED = ("struct", ("a", ("list", "int32"), True), ("b", ("map", "string", "decimal(10,2)"), False))
SCHEMA = plan_evolution(
    None, GivenColumns((Column("größe", "string"),), (Column("n", "int8"), Column("nested", NESTED)))
).schema


def test_a_schema_survives_its_bytes() -> None:
    assert TableSchema.decode(SCHEMA.encode()) == SCHEMA


def test_the_bytes_are_these() -> None:
    schema = plan_evolution(None, GivenColumns((Column("id", "int64"),), (Column("n", "int8"),))).schema

    assert schema.encode() == (
        b'{"flagstone_schema":1,"format":"row","key":[["id","int64",true]],"versions":[[1,[["n","int8",true]]]]}'
    )


def test_every_truncation_and_every_changed_byte_is_damage_or_another_schema() -> None:
    data = SCHEMA.encode()
    for at in range(len(data)):
        with pytest.raises(CorruptData):
            TableSchema.decode(data[:at])
        changed = data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :]
        try:
            read = TableSchema.decode(changed)
        except (CorruptData, InvalidRequest):
            continue
        assert read.encode() == changed


@pytest.mark.parametrize(
    "change",
    [
        {"key": []},
        {"key": [["id", "list<int>", True]]},
        {"key": [["id", ["list", "int8"], True]]},
        {"versions": []},
        {"versions": [[1, []], [1, []]]},
        {"versions": [[0, []]]},
        {"versions": [[True, []]]},
        {"versions": [[1, [["id", "int8", True]]]]},
        {"versions": [[1, [["n", ["set", "int8"], True]]]]},
        {"format": "arrow"},
        {"flagstone_schema": "1"},
        {"more": 1},
    ],
)
def test_a_document_that_is_no_schema_is_damage(change: dict[str, object]) -> None:
    document = {
        "flagstone_schema": 1,
        "format": "row",
        "key": [["id", "int64", True]],
        "versions": [[1, []]],
    }
    data = json.dumps({**document, **change}, separators=(",", ":"), sort_keys=True).encode()

    with pytest.raises(CorruptData, match="damaged"):
        TableSchema.decode(data, schema_key(b"p"))


def test_a_type_that_is_nested_too_deeply_is_damage() -> None:
    data = SCHEMA.encode().replace(b'"int8"', b'["list",' * 5_000 + b'"int8"' + b"]" * 5_000)

    with pytest.raises(CorruptData):
        TableSchema.decode(data)


def test_a_schema_of_a_newer_release_asks_for_an_upgrade() -> None:
    with pytest.raises(InvalidRequest, match="upgrade Flagstone"):
        TableSchema.decode(b'{"flagstone_schema":3}')


def test_the_key_of_a_schema_row_names_its_prefix() -> None:
    assert schema_key() == b"\x00flagstone/schema/"
    assert schema_key(b"o/") == b"\x00flagstone/schema/o/"
    with pytest.raises(InvalidRequest, match="prefix"):
        schema_key(b"x" * 65_535)
