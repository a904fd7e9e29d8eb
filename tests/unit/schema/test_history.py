"""Former and retired schemas: what a schema row keeps when its rows are replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagstone.errors import CorruptData
from flagstone.schema import Column, GivenColumns, SchemaVersion, TableSchema, plan_evolution
from flagstone.schema.history import MAX_FORMER, after_restore, with_former

KEY = (Column("id", "int64"),)


def schema(*numbers: int, name: str = "a", key: tuple[Column, ...] = KEY) -> TableSchema:
    return TableSchema(
        key, tuple(SchemaVersion(each, (Column(f"{name}{each}", "string"),)) for each in numbers)
    )


def replaced(stored: TableSchema, name: str) -> TableSchema:
    return plan_evolution(stored, GivenColumns(KEY, (Column(name, "string"),)), replaces_all=True).schema


def test_a_schema_with_former_ones_or_a_retired_one_is_stored_with_layout_2() -> None:
    kept = replaced(schema(1, 2), "b")

    assert TableSchema.decode(kept.encode()) == kept
    assert kept.former == (schema(1, 2),)
    assert kept.encode().startswith(b'{"flagstone_schema":2,"format":"row","former":[{"format":"row",')
    retired = replace(schema(1), retired=True)
    assert TableSchema.decode(retired.encode()) == retired
    assert schema(1).encode().startswith(b'{"flagstone_schema":1,"format":"row","key":')


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"retired":true', b'"retired":1'), (b'"former":[]', b'"former":[{}]'), (b":2,", b":1,")],
)
def test_other_bytes_of_a_schema_with_layout_2_are_damage(before: bytes, after: bytes) -> None:
    stored = replace(schema(1), retired=True).encode()
    assert before in stored
    with pytest.raises(CorruptData, match="damaged"):
        TableSchema.decode(stored.replace(before, after, 1))


def test_a_version_is_found_in_the_schema_or_in_a_former_one() -> None:
    kept = replaced(replaced(schema(1, 2), "b"), "c")

    assert [version.number for version in kept.versions] == [4]
    assert kept.at(4) == kept
    two = kept.at(2)
    assert two is not None
    assert two.alone() == schema(1, 2)
    assert {each.current.number for each in two.former} == {3, 4}
    assert kept.at(9) is None


def test_an_overwrite_with_the_present_columns_keeps_the_version_and_forgets_only_dropped_columns() -> None:
    stored = schema(1)
    again = plan_evolution(stored, GivenColumns(KEY, stored.current.columns), replaces_all=True)
    assert (again.schema, again.changed) == (stored, True)

    grown = schema(1, 2)
    again = plan_evolution(grown, GivenColumns(KEY, grown.current.columns), replaces_all=True)
    assert [version.number for version in again.schema.versions] == [2]
    assert again.schema.former == (grown,)


def test_only_the_newest_former_schemas_are_kept_and_no_number_is_used_again() -> None:
    stored = schema(1)
    for number in range(MAX_FORMER + 5):
        stored = replaced(stored, f"b{number}")

    assert len(stored.former) == MAX_FORMER
    assert [each.current.number for each in stored.former] == list(range(6, MAX_FORMER + 6))
    assert stored.next_number == MAX_FORMER + 7


def test_of_a_former_schema_with_too_many_versions_the_last_one_is_kept() -> None:
    kept = with_former(schema(1), [schema(*range(2, 1500))])

    assert [each.number for each in kept.former[0].versions] == [1499]
    assert kept.next_number == 1500


def test_the_first_rows_after_an_overwrite_with_bytes_get_the_next_number() -> None:
    retired = replace(schema(1, 2), retired=True)

    planned = plan_evolution(retired, GivenColumns((Column("other", "string"),), ()))

    assert planned.version.number == 3
    assert not planned.schema.retired
    assert planned.schema.former == (schema(1, 2),)


def test_a_restored_schema_keeps_what_is_given_up_and_continues_its_numbers() -> None:
    restored, given_up = schema(1), replaced(schema(1, 2), "b")

    kept = after_restore(restored, given_up)

    assert kept.alone() == restored
    assert [each.current.number for each in kept.former] == [2, 3]
    added = GivenColumns(KEY, (*restored.current.columns, Column("new", "int64")))
    assert plan_evolution(kept, added).version.number == 4
    assert after_restore(None, given_up) == replace(given_up, retired=True)
    assert after_restore(replace(restored, retired=True), given_up).retired
