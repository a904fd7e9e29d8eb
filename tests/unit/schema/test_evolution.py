from __future__ import annotations

import pytest

from flagstone.errors import InvalidRequest
from flagstone.schema import (
    Column,
    Evolution,
    GivenColumns,
    SchemaChanged,
    SchemaCommit,
    SchemaVersion,
    TableSchema,
    plan_evolution,
)

KEY = (Column("region", "string"), Column("id", "int64"))
VALUE = (Column("qty", "int32"), Column("price", "decimal(10,2)"), Column("rate", "float32"))


def stored() -> TableSchema:
    return plan_evolution(None, GivenColumns(KEY, VALUE)).schema


def given(*value: Column, key: tuple[Column, ...] = KEY, form: str = "row") -> Evolution:
    return plan_evolution(stored(), GivenColumns(key, value, form))


QTY, PRICE, RATE = VALUE


@pytest.mark.parametrize("columns", [VALUE, VALUE[::-1], (RATE, QTY, PRICE)])
def test_the_same_columns_in_any_order_need_no_new_version(columns: tuple[Column, ...]) -> None:
    planned = given(*columns)

    assert not planned.changed
    assert planned.schema == stored()
    assert planned.version.names == ("qty", "price", "rate")


@pytest.mark.parametrize(
    ("columns", "changes", "names"),
    [
        ((*VALUE, Column("note", "string")), ("added note string",), ("qty", "price", "rate", "note")),
        (
            (Column("note", "string"), *VALUE),
            ("added note string",),
            ("qty", "price", "rate", "note"),
        ),
        ((QTY, PRICE), ("dropped rate",), ("qty", "price")),
        ((), ("dropped qty", "dropped price", "dropped rate"), ()),
        ((Column("qty", "int64"), PRICE, RATE), ("widened qty to int64",), ("qty", "price", "rate")),
        ((QTY, PRICE, Column("rate", "float64")), ("widened rate to float64",), ("qty", "price", "rate")),
    ],
)
def test_added_dropped_and_widened_columns_make_a_new_version(
    columns: tuple[Column, ...], changes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    planned = given(*columns)

    assert planned.changes == changes
    assert planned.version.number == 2
    assert planned.version.names == names
    assert planned.schema.versions[0] == stored().current


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ((Column("qty", "int16"), PRICE, RATE), "'qty' is stored as int32, and the rows have int16"),
        ((Column("qty", "float32"), PRICE, RATE), "'qty' is stored as int32, and the rows have float32"),
        ((Column("qty", "float64"), PRICE, RATE), "'qty' is stored as int32, and the rows have float64"),
        ((Column("qty", "uint64"), PRICE, RATE), "'qty' is stored as int32"),
        ((Column("qty", "string"), PRICE, RATE), "cast it to int32"),
        ((QTY, Column("price", "decimal(10,3)"), RATE), r"'price' is stored as decimal\(10,2\)"),
        ((QTY, Column("price", "decimal(9,2)"), RATE), r"the rows have decimal\(9,2\)"),
        ((QTY, PRICE, Column("rate", "float16")), "'rate' is stored as float32"),
        ((QTY, PRICE, Column("pace", "float32")), "never renamed"),
        ((QTY, PRICE, RATE, Column("note", "string", nullable=False)), "declare it nullable"),
        ((QTY, PRICE, RATE, Column("region", "string")), "in the key and in the value"),
        ((QTY, PRICE, RATE, QTY), "two columns of one name"),
        ((Column("qty", "decimal(10,2)"), Column("price", "int32"), RATE), "'qty' is stored as int32"),
    ],
)
def test_other_columns_are_refused_with_a_sentence(columns: tuple[Column, ...], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        given(*columns)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (KEY[::-1], "in this order"),
        (KEY[:1], "the key columns are region, id"),
        ((KEY[0], Column("number", "int64")), "the rows were given with region, number"),
        ((KEY[0], Column("id", "int32")), "key column 'id' is stored as int64"),
    ],
)
def test_other_key_columns_are_refused(key: tuple[Column, ...], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        given(*VALUE, key=key)


def test_another_value_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="format 'row'"):
        given(*VALUE, form="json")


def test_a_dropped_column_comes_back_with_its_type_or_a_wider_one_and_with_no_other() -> None:
    dropped = plan_evolution(stored(), GivenColumns(KEY, (PRICE, RATE))).schema

    assert plan_evolution(dropped, GivenColumns(KEY, (QTY, PRICE, RATE))).changes == ("added qty int32",)
    wide = GivenColumns(KEY, (Column("qty", "int64"), PRICE, RATE))
    assert plan_evolution(dropped, wide).version.column("qty") == Column("qty", "int64")
    with pytest.raises(InvalidRequest, match="'qty' is stored as int32"):
        plan_evolution(dropped, GivenColumns(KEY, (Column("qty", "string"), PRICE, RATE)))


def test_rows_that_replace_everything_may_have_any_columns_and_get_a_number_never_used() -> None:
    grown = given(*VALUE, Column("note", "string")).schema
    other = (Column("n", "int8"),)

    planned = plan_evolution(grown, GivenColumns(other, VALUE), replaces_all=True)

    assert [version.number for version in planned.schema.versions] == [3]
    assert planned.schema.key == other
    assert planned.changed


def test_versions_are_bounded() -> None:
    full = TableSchema(KEY, tuple(SchemaVersion(at + 1, VALUE) for at in range(1_000)))

    with pytest.raises(InvalidRequest, match="1000 versions"):
        plan_evolution(full, GivenColumns(KEY, VALUE[:1]))
    assert not plan_evolution(full, GivenColumns(KEY, VALUE)).changed


# -- the commit ------------------------------------------------------------------------------------------------


def test_the_commit_writes_the_schema_once_and_only_when_it_changed() -> None:
    first = SchemaCommit.plan(None, GivenColumns(KEY, VALUE))
    row = first.settle(None)

    assert row == stored().encode()
    again = SchemaCommit.plan(row, GivenColumns(KEY, VALUE))
    assert again.settle(row) is None


def test_two_commits_with_the_same_new_version_both_succeed() -> None:
    base = stored().encode()
    grown = GivenColumns(KEY, (*VALUE, Column("note", "string")))
    one, two = SchemaCommit.plan(base, grown), SchemaCommit.plan(base, grown)

    row = one.settle(base)
    assert row is not None
    assert two.settle(row) is None


def test_of_two_commits_with_different_new_versions_the_second_is_refused() -> None:
    base = stored().encode()
    one = SchemaCommit.plan(base, GivenColumns(KEY, (*VALUE, Column("note", "string"))))
    two = SchemaCommit.plan(base, GivenColumns(KEY, (*VALUE, Column("size", "int8"))))

    row = one.settle(base)
    with pytest.raises(SchemaChanged, match="another process has changed the schema"):
        two.settle(row)


def test_rows_of_a_stored_version_are_committed_beside_a_newer_one() -> None:
    base = stored().encode()
    same = SchemaCommit.plan(base, GivenColumns(KEY, VALUE))
    row = SchemaCommit.plan(base, GivenColumns(KEY, (*VALUE, Column("note", "string")))).settle(base)

    assert same.settle(row) is None


@pytest.mark.parametrize("replaced", [None, b"other"])
def test_rows_whose_version_was_replaced_are_refused(replaced: bytes | None) -> None:
    base = stored().encode()
    same = SchemaCommit.plan(base, GivenColumns(KEY, VALUE))
    if replaced is not None:
        other = GivenColumns((Column("n", "int8"),), VALUE)
        replaced = SchemaCommit.plan(base, other, replaces_all=True).settle(base)

    with pytest.raises(SchemaChanged):
        same.settle(replaced)


def test_a_commit_survives_as_text() -> None:
    commit = SchemaCommit.plan(stored().encode(), GivenColumns(KEY, VALUE[:2]), prefix=b"\x00o/")

    assert SchemaCommit.from_text(commit.to_text()) == commit
