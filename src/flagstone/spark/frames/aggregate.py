"""`aggregate`: sums, counts and extremes, computed in Arrow in the tasks that decode the rows, and combined by Spark.

The results have the types and the values that Spark gives: NaN is the largest number, a sum of whole numbers is exact
or an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Unpack

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import DataType, DecimalType, DoubleType, LongType, StructField, StructType

from flagstone.errors import InvalidRequest
from flagstone.spark.frames.checkpoints import keep_while_used
from flagstone.spark.frames.map_arrow import mapped, require_complete_where
from flagstone.spark.frames.plan import ReadArguments, plan_read
from flagstone.spark.row_mapping import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_CALL: Final = re.compile(
    r"\s*(count|sum|min|max|avg)\s*\(\s*(?:(\*)|`([^`]+)`|([^\s()`]+))\s*\)\s*", re.IGNORECASE
)
_MERGE_ROWS: Final = 200_000
"""Partial results of a task are combined when they have this many rows."""

_EXACT: Final = pa.decimal128(38, 0)

_SAFE_DIGITS: Final = 28
"""A sum of decimals with so many digits fits into 38, whatever the number of rows. Arrow does not check others."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One aggregate: its name in the result, the function, and its column (None: `count(*)`)."""

    name: str
    function: str
    column: str | None

    @classmethod
    def parse(cls, name: str, text: str) -> Measure:
        """The aggregate written as `sum(price)` or `count(*)`."""
        found = _CALL.fullmatch(text)
        if found is None or (found[2] and found[1].lower() != "count"):
            raise InvalidRequest(
                f"aggregate {name!r} is {text!r}; write count(*), or count, sum, min, max or avg of a column"
            )
        return cls(name, found[1].lower(), found[3] or found[4])


def aggregate(
    spark: SparkSession,
    url: str | os.PathLike[str],
    measures: Mapping[str, str],
    *,
    group_by: Sequence[str] = (),
    **arguments: Unpack[ReadArguments],
) -> DataFrame:
    """The `measures`, such as `{"total": "sum(price)", "rows": "count(*)"}`, of each group, or of all rows.

    Functions are count, sum, min, max and avg. Rows are those of `read` with the same arguments. Each task returns one
    row per group, so this is quick if there are far fewer groups than rows.

    Raises:
        InvalidRequest: an argument is wrong, a column has no such aggregate, or `where` has a condition that only Spark
            can apply.
        Unavailable: the store did not answer.

    """
    if isinstance(group_by, str):
        raise InvalidRequest("group_by is a list of names, not one text")
    wanted = [Measure.parse(name, text) for name, text in measures.items()]
    if not wanted:
        raise InvalidRequest("an aggregate needs a measure, such as {'rows': 'count(*)'}")
    columns = list(dict.fromkeys([*group_by, *(each.column for each in wanted if each.column)]))
    given: Any = {**arguments, "columns": columns or ["seq"]}
    plan = plan_read(url, given, spark=spark)
    require_complete_where(plan)
    types = {field.name: field.dataType for field in plan.schema.fields}
    for each in wanted:
        check_measure(each, types)
    work = Partial(tuple(wanted), tuple(group_by), plan.schema)
    held = plan.hold()
    partial = mapped(spark, plan, held, work, work.schema)
    if arguments.get("checkpoint") is None:
        keep_while_used(spark, partial, held)
    results = [final(number, each, types).alias(each.name) for number, each in enumerate(wanted)]
    keys = [F.col(_key(number)).alias(name) for number, name in enumerate(group_by)]
    return partial.groupBy(*keys).agg(*results)


def check_measure(measure: Measure, types: Mapping[str, DataType]) -> None:
    """Raise `InvalidRequest` if the column's type has no such aggregate."""
    if measure.column is None or measure.function == "count":
        return
    kind = types[measure.column]
    arrow = arrow_schema(StructType([StructField("x", kind)])).field(0).type
    numeric = pa.types.is_integer(arrow) or pa.types.is_floating(arrow)
    allowed = {
        "sum": numeric or pa.types.is_decimal(arrow),
        "avg": numeric,
        "min": not pa.types.is_nested(arrow),
        "max": not pa.types.is_nested(arrow),
    }
    if not allowed[measure.function]:
        hint = "; use sum and count" if pa.types.is_decimal(arrow) else ""
        raise InvalidRequest(
            f"{measure.function} of {measure.column!r}, a {kind.simpleString()}, is not available{hint}"
        )


@dataclass(frozen=True)
class Partial:
    """The first stage: the measures of the rows of one task, one row per group. Called with the batches of the task.

    A measure has up to two columns: its value or sum, and a count (of rows for avg, of NaN for min and max).
    """

    measures: tuple[Measure, ...]
    group_by: tuple[str, ...]
    rows: StructType

    @property
    def schema(self) -> StructType:
        """The columns of partial results."""
        fields = [
            StructField(_key(number), self.rows[name].dataType) for number, name in enumerate(self.group_by)
        ]
        for number, each in enumerate(self.measures):
            fields.append(StructField(_value(number), self._value_type(each)))
            fields.append(StructField(_count(number), LongType()))
        return StructType(fields)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        schema = arrow_schema(self.schema)
        held: list[pa.Table] = []
        size = 0
        for batch in batches:
            if batch.num_rows:
                part = _fitted(self._reduced(batch), schema)
                held.append(part)
                size += part.num_rows
            if size > _MERGE_ROWS:
                held = [_fitted(self._combined(held), schema)]
                size = held[0].num_rows
                if size > _MERGE_ROWS // 2:  # nearly all groups are new: Spark combines them
                    yield from held[0].to_batches()
                    held, size = [], 0
        if held:
            yield from _fitted(self._combined(held), schema).to_batches()

    def _value_type(self, measure: Measure) -> DataType:
        if measure.column is None or measure.function == "count":
            return LongType()
        kind = self.rows[measure.column].dataType
        if measure.function not in ("sum", "avg"):
            return kind
        if isinstance(kind, DecimalType):
            return DecimalType(38, kind.scale)
        return DoubleType() if _is_float(kind) else DecimalType(38, 0)

    def _reduced(self, batch: pa.RecordBatch) -> pa.Table:
        """The partial results of one batch."""
        columns = {_key(number): batch.column(name) for number, name in enumerate(self.group_by)}
        steps: list[tuple[str, str]] = []
        for number, each in enumerate(self.measures):
            value, count = self._inputs(each, batch)
            columns |= {_value(number): value, _count(number): count}
            steps += [(_value(number), _step(each)), (_count(number), "sum")]
        return _grouped(pa.table(columns), len(self.group_by), steps)

    def _inputs(self, measure: Measure, batch: pa.RecordBatch) -> tuple[Any, Any]:
        ones = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
        if measure.column is None:
            return ones, ones
        column = batch.column(measure.column)
        if measure.function == "count":
            return pc.is_valid(column).cast(pa.int64()), ones
        if measure.function in ("min", "max"):
            if not pa.types.is_floating(column.type):
                return column, ones
            # To Spark NaN is above all numbers; Arrow leaves it out.
            nan = pc.fill_null(pc.is_nan(column), fill_value=False)
            return pc.if_else(nan, pa.scalar(None, column.type), column), nan.cast(pa.int64())
        valid = pc.is_valid(column).cast(pa.int64())
        return (summable(column) if pa.types.is_integer(column.type) else _widened(column)), valid

    def _combined(self, parts: list[pa.Table]) -> pa.Table:
        steps: list[tuple[str, str]] = []
        for number, each in enumerate(self.measures):
            steps += [(_value(number), _step(each)), (_count(number), "sum")]
        joined = pa.concat_tables(parts)
        for number, each in enumerate(self.measures):
            if each.function == "sum" and self._is_wide(each):
                at = joined.schema.get_field_index(_value(number))
                joined = joined.set_column(at, _value(number), _widened(joined.column(at)))
        return _grouped(joined, len(self.group_by), steps)

    def _is_wide(self, measure: Measure) -> bool:
        """Whether the sum of the column may have more digits than Spark and 128 bits can hold."""
        kind = None if measure.column is None else self.rows[measure.column].dataType
        return isinstance(kind, DecimalType) and kind.precision > _SAFE_DIGITS


def summable(column: Any) -> Any:
    """Whole numbers in a type in which their sum cannot overflow."""
    if column.type.bit_width < 64:
        return column.cast(pa.int64())
    extremes = pc.min_max(column)
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    if low is None or max(-low, high) * len(column) < 2**63:
        return column
    return column.cast(_EXACT)


def _widened(column: Any) -> Any:
    kind = column.type
    if pa.types.is_decimal(kind):
        wide = (
            pa.decimal256(76, kind.scale) if kind.precision > _SAFE_DIGITS else pa.decimal128(38, kind.scale)
        )
        return column.cast(wide)
    return column.cast(pa.float64())


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with these types. Raises `InvalidRequest` if a sum does not fit; Spark fails as well then."""
    try:
        return table.cast(schema)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(f"a sum has more than 38 digits: {error}") from None


def _grouped(table: pa.Table, keys: int, steps: list[tuple[str, str]]) -> pa.Table:
    names = [_key(number) for number in range(keys)]
    found = table.group_by(names, use_threads=False).aggregate(steps)
    picked = [found.column(name) for name in names] + [found.column(f"{name}_{step}") for name, step in steps]
    return pa.table(picked, names=[*names, *(name for name, _ in steps)])


def _step(measure: Measure) -> str:
    return measure.function if measure.function in ("min", "max") else "sum"


def final(number: int, measure: Measure, types: Mapping[str, DataType]) -> Column:
    """The second stage of a measure: an expression of Spark over partial results."""
    value, count = F.col(_value(number)), F.col(_count(number))
    if measure.column is None or measure.function == "count":
        return F.coalesce(F.sum(value), F.lit(0))
    kind = types[measure.column]
    if measure.function == "sum":
        if isinstance(kind, DecimalType):
            return F.sum(value).cast(DecimalType(min(38, kind.precision + 10), kind.scale))
        return F.sum(value).cast(DoubleType() if _is_float(kind) else LongType())
    if measure.function == "avg":
        return F.when(F.sum(count) > 0, F.sum(value).cast(DoubleType()) / F.sum(count))
    extreme = F.min(value) if measure.function == "min" else F.max(value)
    if not _is_float(kind):
        return extreme
    nan = F.lit(float("nan")).cast(kind)
    hides = extreme.isNull() if measure.function == "min" else F.lit(1) == F.lit(1)
    return F.when((F.sum(count) > 0) & hides, nan).otherwise(extreme)


def _is_float(kind: DataType) -> bool:
    return kind.typeName() in ("float", "double")


def _key(number: int) -> str:
    return f"k{number}"


def _value(number: int) -> str:
    return f"v{number}"


def _count(number: int) -> str:
    return f"c{number}"
