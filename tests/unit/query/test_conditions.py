"""Which key ranges a condition leaves, and how expressions are taken apart."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from flagstone.keys import KeySchema
from flagstone.query.arrow_expressions import NotReadable, read_expression
from flagstone.query.conditions import Compare, Either, RawKeys, TupleKeys, Unknown, is_single_key, key_ranges
from flagstone.query.polars_expressions import read_predicate
from flagstone.types import KeyRange

KEY, NUMBER = pc.field("key"), pc.field("number")
EVERYTHING = [KeyRange()]


def ranges(expression: Any, within: KeyRange = KeyRange()) -> list[KeyRange]:  # noqa: B008
    return key_ranges(read_expression(expression).condition, RawKeys(), within)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ((KEY >= b"b") & (KEY < b"d"), [KeyRange(b"b", b"d")]),
        ((KEY < b"b") | (KEY > b"d"), [KeyRange(None, b"b"), KeyRange(b"d\0")]),
        (~((KEY < b"b") | (KEY > b"d")), [KeyRange(b"b", b"d\0")]),
        (KEY.isin([b"b", b"a"]), [KeyRange(b"a", b"a\0"), KeyRange(b"b", b"b\0")]),
        (pc.starts_with(KEY, "ab"), [KeyRange(b"ab", b"ac")]),
        ((KEY == b"a") & (KEY == b"b"), []),
        ((KEY >= b"b") & (NUMBER > 1), [KeyRange(b"b")]),
        ((KEY >= b"b") | (NUMBER > 1), EVERYTHING),
        (KEY != b"b", EVERYTHING),
        (pc.equal(KEY, 7), EVERYTHING),
        (KEY.cast(pa.string()) == "a", EVERYTHING),
        ((KEY >= b"b") & pa.scalar(None, pa.bool_()), []),
        (pc.scalar(b"b") < KEY, [KeyRange(b"b\0")]),
    ],
    ids=str,
)
def test_conditions_on_keys_become_ranges(expression: Any, expected: list[KeyRange]) -> None:
    assert ranges(expression) == expected


def test_ranges_stay_within_the_keys_of_the_dataset() -> None:
    assert ranges(KEY < b"d", KeyRange(b"b", b"z")) == [KeyRange(b"b", b"d")]
    assert ranges(KEY < b"a", KeyRange(b"b", b"z")) == []


def test_equal_leading_columns_narrow_the_next_one() -> None:
    schema = KeySchema({"region": "string", "number": "int32"})
    region = pc.field("region")

    def of(expression: Any) -> list[KeyRange]:
        return key_ranges(read_expression(expression).condition, TupleKeys(schema), KeyRange())

    assert of((region == "a") & (NUMBER >= 5)) == [KeyRange(schema.encode("a", 5), schema.range("a")[1])]
    pairs = ((region == "a") & (NUMBER == 5)) | ((region == "b") & (NUMBER == 6))
    found = of(pairs)
    assert [each.start for each in found] == [schema.encode("a", 5), schema.encode("b", 6)]
    assert all(map(is_single_key, found))
    assert of(NUMBER == 5) == EVERYTHING
    assert of(region == 5) == EVERYTHING


def test_an_expression_gives_the_columns_that_it_refers_to() -> None:
    nested = pc.field("address", "street") == "Main"
    assert read_expression(nested & (KEY > b"a") & pc.is_null(NUMBER)).columns == {"address", "key", "number"}


def test_an_expression_that_does_not_pickle_is_not_readable() -> None:
    with pytest.raises(NotReadable):
        read_expression("key > 1")


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (pl.col("key") >= b"a", Compare("key", ">=", b"a")),
        (pl.lit(3) < pl.col("n"), Compare("n", ">", 3)),
        (
            (pl.col("n") == 1) | pl.col("s").str.contains("x"),
            Either((Compare("n", "=", 1), Unknown())),
        ),
        (pl.col("n") == pl.lit(None), Unknown()),
        (pl.col("n").is_duplicated(), Unknown()),
    ],
    ids=str,
)
def test_polars_predicates_are_taken_apart(predicate: pl.Expr, expected: Any) -> None:
    assert read_predicate(predicate) == expected
