"""Values come back with their types and nulls, in every format, nested or not; damage is noticed, never a crash."""

from __future__ import annotations

import math
from datetime import UTC
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import values
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.values import row_codec as row_module
from kit.kernels import damaged, outcome

pytestmark = pytest.mark.slow


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    return st.integers(1 - 10**precision, 10**precision - 1).map(
        lambda number: Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale))
    )


LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    *(
        (pa.type_for_alias(f"int{bits}"), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
        for bits in (8, 16, 32, 64)
    ),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    *(
        (pa.decimal128(precision, scale), decimals(precision, scale))
        for precision, scale in ((9, 0), (10, 2), (18, 18), (38, 10))
    ),
    (pa.decimal256(50, 5), decimals(50, 5)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("s"), st.datetimes().map(lambda at: at.replace(microsecond=0))),
    (pa.time64("us"), st.times()),
    (pa.string(), st.text(max_size=6)),
    (pa.large_string(), st.text(max_size=6)),
    (pa.binary(), st.binary(max_size=200)),
    (pa.binary(4), st.binary(min_size=4, max_size=4)),
    (pa.null(), st.none()),
]


def nested(inner: tuple[Any, st.SearchStrategy[Any]], shape: str) -> tuple[Any, st.SearchStrategy[Any]]:
    kind, items = inner
    maybe = st.one_of(st.none(), items)
    if shape == "list":
        return pa.list_(kind), st.lists(maybe, max_size=10)
    if shape == "large_list":
        return pa.large_list(kind), st.lists(maybe, max_size=3)
    if shape == "struct":
        fields = [("a", kind), ("b", pa.string())]
        return pa.struct(fields), st.fixed_dictionaries({"a": maybe, "b": st.text(max_size=3)})
    return pa.map_(pa.int32(), kind), st.lists(st.tuples(st.integers(0, 99), maybe), max_size=3)


columns: st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]] = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.builds(nested, inner, st.sampled_from(["list", "large_list", "struct", "map"])),
    max_leaves=3,
)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    chosen = draw(st.lists(columns, min_size=1, max_size=10))
    rows = draw(st.integers(0, 5))
    arrays = [
        pa.array(draw(st.lists(st.one_of(st.none(), items), min_size=rows, max_size=rows)), kind)
        for kind, items in chosen
    ]
    batch = pa.RecordBatch.from_arrays(arrays, names=[f"c{index}" for index in range(len(arrays))])
    return batch.slice(draw(st.integers(0, rows)))


def same(one: Any, other: Any) -> bool:
    """Equal, and NaN equals NaN, and -0.0 is not 0.0."""
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", values.FORMATS)
@given(batch=batches())
def test_an_encoded_batch_decodes_with_its_types_and_nulls(name: str, batch: pa.RecordBatch) -> None:
    codec = values.codec(name, batch.schema)
    encoded = codec.encode_arrow(batch)
    decoded = codec.decode_arrow(encoded)

    decoded.validate(full=True)
    assert encoded.null_count == 0
    assert decoded.schema == batch.schema
    assert same(decoded.to_pylist(), batch.to_pylist())


plain_columns = st.lists(
    st.sampled_from([leaf for leaf in LEAVES if leaf[0] != pa.null()]), min_size=1, max_size=9
)


@given(plain_columns, st.data())
def test_single_values_are_encoded_and_decoded_as_columns_are(chosen: list[Any], data: st.DataObject) -> None:
    schema = pa.schema([(f"c{index}", kind) for index, (kind, _) in enumerate(chosen)])
    row = {f"c{index}": data.draw(st.one_of(st.none(), items)) for index, (_, items) in enumerate(chosen)}
    codec = values.codec("row", schema)
    slow = values.codec("row", schema)
    slow._single = None  # type: ignore[attr-defined]

    value = codec.encode(row)
    changes = data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), max_size=2))
    broken = damaged(value, changes, data.draw(st.integers(0, 2)))

    assert value == slow.encode(row)
    assert same(codec.decode(value), slow.decode(value))
    assert same(codec.decode(value), row)
    assert same(fate(codec, broken), fate(slow, broken))


def fate(codec: Any, value: bytes) -> Any:
    try:
        return codec.decode(value)
    except (CorruptData, InvalidRequest) as problem:
        return [type(problem).__name__, str(problem)]


@given(batches(), st.data())
def test_columns_may_be_added_at_the_end(batch: pa.RecordBatch, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, batch.num_columns))
    older = batch.select(list(range(kept)))
    for name in values.FORMATS:
        written = values.codec(name, older.schema).encode_arrow(older)
        found = values.codec(name, batch.schema).decode_arrow(written)
        assert same(found.select(list(range(kept))).to_pylist(), older.to_pylist())
        assert all(
            found.column(index).null_count == batch.num_rows for index in range(kept, batch.num_columns)
        )
        # A reader with the older schema does not see the new columns.
        newer = values.codec(name, batch.schema).encode_arrow(batch)
        assert same(values.codec(name, older.schema).decode_arrow(newer).to_pylist(), older.to_pylist())


@pytest.mark.skipif(load_compiled("value_rows") is None, reason="kernels were not compiled here")
@given(batches(), st.data())
def test_compiled_and_interpreted_kernel_agree_on_valid_and_damaged_values(
    batch: pa.RecordBatch, data: st.DataObject
) -> None:
    codec = values.codec("row", batch.schema)
    damage = data.draw(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 255)), max_size=2))
    cut = data.draw(st.integers(0, 3))
    results = []
    for kernel in (load_compiled("value_rows"), load_interpreted("value_rows")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_module, "value_rows", kernel)
            encoded = codec.encode_arrow(batch).to_pylist()
            stored = pa.array([damaged(value, damage, cut) for value in encoded], pa.binary())
            fate = outcome(codec.decode_arrow, stored)
            if not isinstance(fate, tuple):
                fate = [str(column) for column in fate.columns]
            results.append((encoded, fate))

    assert results[0] == results[1]


@pytest.mark.parametrize("name", values.FORMATS)
@given(
    raws=st.lists(st.binary(max_size=40), min_size=1, max_size=3),
    chosen=st.lists(columns, min_size=1, max_size=3),
)
def test_any_bytes_decode_to_values_or_are_refused(name: str, raws: list[bytes], chosen: list[Any]) -> None:
    schema = pa.schema([(f"c{index}", kind) for index, (kind, _) in enumerate(chosen)])
    codec = values.codec(name, schema)
    rows = [b"\x01" + raw for raw in raws] if name == "row" else [b'{"c0":' + raw + b"}" for raw in raws]

    fate = outcome(codec.decode_arrow, pa.array(rows, pa.binary()))

    if not isinstance(fate, tuple):
        fate.validate(full=True)
