"""Keys sort as their tuples do, come back as they were, and columns give the bytes that single tuples give."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from flagstone import keys
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.keys import columnar
from flagstone.types import KeyRange
from kit.kernels import damaged, outcome

zones = st.sampled_from([UTC, timezone(timedelta(hours=-7)), timezone(timedelta(hours=5, minutes=30))])
integers = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-300, 300),
    # One to each side of where another byte begins.
    st.builds(
        lambda bits, step, sign: sign * 2**bits + step,
        st.integers(0, 62),
        st.integers(-1, 1),
        st.sampled_from([1, -1]),
    ),
)
floats = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, -5e-324]))
decimals = st.builds(
    lambda number, scale: Decimal(number).scaleb(-scale, context=None),
    st.one_of(st.integers(-(10**27), 10**27), st.integers(-1100, 1100)),
    st.integers(-12, 40),
)
texts = st.one_of(st.text(max_size=8), st.text(alphabet="\x00\x01\x02ab", max_size=5))
binaries = st.one_of(
    st.binary(max_size=8), st.lists(st.sampled_from([0, 1, 2, 0xFE, 0xFF]), max_size=5).map(bytes)
)
parts: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    floats,
    decimals,
    st.dates(),
    st.datetimes(),
    st.datetimes(min_value=datetime(2, 1, 1), max_value=datetime(9998, 1, 1), timezones=zones),
    texts,
    binaries,
)
tuples = st.lists(parts, max_size=4).map(tuple)


def rank(part: Any) -> tuple[Any, ...]:
    """The order of one part, defined independently of the encoding."""
    if part is None:
        return (0,)
    if isinstance(part, bool):
        return 1, part
    if isinstance(part, int):
        return 2, part
    if isinstance(part, float):
        return 3, math.isnan(part), 0.0 if math.isnan(part) else part
    if isinstance(part, Decimal):
        return 4, part
    if isinstance(part, datetime):
        return (6, part) if part.tzinfo is None else (7, part)
    if isinstance(part, date):
        return 5, part
    return (8, [ord(letter) for letter in part]) if isinstance(part, str) else (9, part)


def ranks(row: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [rank(part) for part in row]


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and ranks((one,)) == ranks((other,))


@given(tuples, tuples)
@example((-0.0,), (0.0,))
@example(("eu",), ("europe",))
@example(("a",), ("a\x00",))
@example(("a", None), ("a\x00",))
@example((Decimal("1.0"),), (Decimal("1.00"),))
@example((Decimal("-12.5"),), (Decimal("-12.45"),))
def test_keys_sort_as_their_tuples_do(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    left, right = keys.encode(one), keys.encode(other)

    assert (left < right) == (ranks(one) < ranks(other))
    assert (left == right) == (ranks(one) == ranks(other))


@given(parts, parts, tuples, tuples)
def test_the_first_part_that_differs_decides_the_order(
    one: Any, other: Any, tail: Any, other_tail: Any
) -> None:
    assume(rank(one) < rank(other))

    assert keys.encode((one, *tail)) < keys.encode((other, *other_tail))


@given(tuples)
def test_a_key_decodes_to_its_tuple(row: tuple[Any, ...]) -> None:
    decoded = keys.decode(keys.encode(row))

    assert len(decoded) == len(row)
    assert all(same(one, other) for one, other in zip(decoded, row, strict=True))


@given(tuples, tuples)
def test_a_key_is_a_prefix_of_exactly_the_keys_whose_tuples_extend_its_tuple(
    row: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    prefix = keys.encode(row)

    assert keys.encode(row + other).startswith(prefix)
    assert keys.encode(row + other) == prefix + keys.encode(other)
    assert keys.encode(other).startswith(prefix) == (ranks(other)[: len(row)] == ranks(row))


@given(tuples, tuples)
def test_a_range_contains_exactly_the_tuples_that_start_with_its_parts(
    row: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    start, stop = keys.range(row)

    for candidate in (other, row, row + other):
        begins = ranks(candidate)[: len(row)] == ranks(row)
        assert (keys.encode(candidate) in KeyRange(start, stop)) == begins
        behind = not begins and ranks(candidate) > ranks(row)
        assert (keys.encode(candidate) >= keys.successor(row)) == behind


@given(st.binary(max_size=40))
@example(b"\x38\x7f\xff\xff\xff\xff\xff\xff\xff")
@example(b"\x42\x80\x01\x0b\x01\x00")
@example(b"\x20\x7f\xff\xff\xff\xff\xff\xff\xff")
def test_any_bytes_decode_to_a_key_or_are_refused(raw: bytes) -> None:
    try:
        decoded = keys.decode(raw)
    except CorruptData as problem:
        assert problem.offset is not None
        assert 0 <= problem.offset < len(raw)
    except InvalidRequest as problem:
        assert "decode_arrow" in str(problem)
    else:
        assert keys.encode(decoded) == raw


@given(tuples.filter(bool), st.data())
def test_a_damaged_key_decodes_to_another_key_or_is_refused(
    row: tuple[Any, ...], data: st.DataObject
) -> None:
    raw = bytearray(keys.encode(row))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw)

    test_any_bytes_decode_to_a_key_or_are_refused.hypothesis.inner_test(damaged)  # type: ignore[attr-defined]


def within(low: int, high: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(low, high), st.integers(max(low, -300), min(high, 300)))


COLUMNS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    *(
        (pa.type_for_alias(f"int{bits}"), within(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
        for bits in (8, 16, 32, 64)
    ),
    *((pa.type_for_alias(f"uint{bits}"), within(0, 2**bits - 1)) for bits in (8, 16, 32, 64)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), floats),
    *(
        (
            pa.decimal128(precision, scale),
            within(1 - 10**precision, 10**precision - 1).map(
                lambda number, scale=scale: Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale))
            ),
        )
        for precision, scale in ((1, 0), (9, 2), (18, 18), (38, 10), (38, 0), (20, -3))
    ),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(UTC))),
    (
        pa.timestamp("ms"),
        st.datetimes().map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)),
    ),
    (pa.string(), texts),
    (pa.large_string(), texts),
    (pa.binary(), binaries),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
]


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    chosen = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    rows = draw(st.integers(0, 6))
    arrays = [
        pa.array(draw(st.lists(st.one_of(st.none(), values), min_size=rows, max_size=rows)), kind)
        for kind, values in chosen
    ]
    batch = pa.RecordBatch.from_arrays(arrays, names=[f"c{index}" for index in range(len(arrays))])
    # Slices begin somewhere inside their buffers.
    return batch.slice(draw(st.integers(0, rows)))


@given(batches())
def test_columns_encode_to_the_keys_of_their_rows(batch: pa.RecordBatch) -> None:
    encoded = keys.encode_arrow(batch)

    assert encoded.type == pa.binary()
    assert encoded.to_pylist() == [keys.encode(tuple(row.values())) for row in batch.to_pylist()]


@given(batches())
def test_encoded_columns_decode_to_the_same_columns(batch: pa.RecordBatch) -> None:
    decoded = keys.decode_arrow(keys.encode_arrow(batch), batch.schema)

    for column, before in zip(decoded, batch.columns, strict=True):
        column.validate(full=True)
        assert column.type == before.type
        assert all(
            same(one, other) for one, other in zip(column.to_pylist(), before.to_pylist(), strict=True)
        )


@given(batches())
def test_a_schema_encodes_and_decodes_as_columns_do(batch: pa.RecordBatch) -> None:
    schema = keys.KeySchema.of(batch.schema)

    for key, row in zip(keys.encode_arrow(batch).to_pylist(), batch.to_pylist(), strict=True):
        assert schema.encode(tuple(row.values())) == key
        assert all(same(one, other) for one, other in zip(schema.decode(key), row.values(), strict=True))


@pytest.mark.skipif(load_compiled("tuple_writer") is None, reason="kernels were not compiled here")
@given(batches(), st.data())
def test_compiled_and_interpreted_kernel_agree_on_valid_and_damaged_keys(
    batch: pa.RecordBatch, data: st.DataObject
) -> None:
    results = []
    damage = data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), max_size=2))
    cut = data.draw(st.integers(0, 1))
    for load in (load_compiled, load_interpreted):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("tuple_writer", "tuple_reader"):
                patch.setattr(columnar, name, load(name))
            encoded = keys.encode_arrow(batch).to_pylist()
            stored = pa.array([damaged(key, damage, cut) for key in encoded], pa.binary())
            fate = outcome(keys.decode_arrow, stored, batch.schema)
            results.append((encoded, fate if isinstance(fate, tuple) else list(map(str, fate))))

    assert results[0] == results[1]


@given(st.lists(st.binary(max_size=30), max_size=4), st.sampled_from(COLUMNS))
def test_a_column_of_any_bytes_decodes_as_its_single_keys_or_is_refused(
    raws: list[bytes], column: Any
) -> None:
    schema = pa.schema([("part", column[0])])
    fate = outcome(keys.decode_arrow, pa.array(raws, pa.binary()), schema)

    if not isinstance(fate, tuple):
        again = keys.encode_arrow(fate)
        assert again.to_pylist() == raws
