"""Structured rows that do not decode: `mode` PERMISSIVE, DROPMALFORMED or FAILFAST, as in Spark's file sources.

A row is malformed if its key or its value is not one of the schema: another program wrote it, or a load of bytes did.
Damage of the database itself is another matter: a block with a wrong checksum fails every read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from flagstone.errors import CorruptData, InvalidRequest

_MODES: Final = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
_COLUMN_OPTION: Final = "columnnameofcorruptrecord"

Decode = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MalformedRows:
    """What a read does with malformed rows. PERMISSIVE is Spark's default.

    PERMISSIVE: the columns that do not decode are null, and the column `column`, if the schema has it, has the bytes of
    the value, or of the key if the key does not decode. DROPMALFORMED leaves such rows out. FAILFAST fails.
    """

    mode: str = "PERMISSIVE"
    column: str = "_corrupt"
    named: bool = False
    """Whether the user named the column, so that a read without a schema shows it."""


def parse_malformed(options: Mapping[str, str]) -> MalformedRows:
    """Raises `InvalidRequest` for an unknown mode."""
    lowered = {name.lower(): value for name, value in options.items()}
    mode = lowered.get("mode", "PERMISSIVE").upper()
    if mode not in _MODES:
        raise InvalidRequest(f"option 'mode' is {mode!r}; modes are {', '.join(_MODES)}")
    column = lowered.get(_COLUMN_OPTION)
    return MalformedRows(mode, column or "_corrupt", named=bool(column))


def decode_rows(
    batch: pa.RecordBatch, types: pa.Schema, options: MalformedRows, *, key: Decode, value: Decode
) -> tuple[pa.RecordBatch, int]:
    """The columns `types` of raw rows, and the number of malformed rows among them.

    `key` and `value` decode a raw column to named columns. Raises `CorruptData` or `InvalidRequest` with FAILFAST, and
    for a malformed row if a column of `types` that would be null is not nullable.
    """
    names = batch.schema.names
    columns = {name: batch.column(names.index(name)) for name in names if name not in ("key", "value")}
    bad: dict[str, list[int]] = {}
    for name, decode in (("key", key), ("value", value)):
        if name not in names:
            continue
        raw = batch.column(names.index(name))
        try:
            columns |= decode(raw)
        except (CorruptData, InvalidRequest):
            if options.mode == "FAILFAST":
                raise
            rows = find_malformed(raw, decode)
            if not rows:  # no single row is wrong: the error is about all of them
                raise
            bad[name] = rows
            columns |= _without(raw, rows, decode)
    rows = sorted({row for found in bad.values() for row in found})
    if rows and options.mode != "DROPMALFORMED":
        never_null = [field.name for field in types if not field.nullable and columns[field.name].null_count]
        if never_null:
            raise CorruptData(
                f"a row does not decode, and column {never_null[0]!r} is not nullable in the schema of the read: make "
                "it nullable, or drop such rows with mode DROPMALFORMED"
            )
    if options.column in types.names and options.column not in columns:
        columns[options.column] = _raw_of(batch, bad, types.field(options.column).type)
    made = pa.RecordBatch.from_arrays([columns[field.name] for field in types], names=types.names)
    if rows and options.mode == "DROPMALFORMED":
        kept = sorted(set(range(batch.num_rows)).difference(rows))
        made = made.take(pa.array(kept, pa.int64()))
    return made, len(rows)


def find_malformed(raw: Any, decode: Decode) -> list[int]:
    """The rows that do not decode, found by halving: a few decodes for each."""
    found: list[int] = []
    parts = [(0, len(raw))]
    while parts:
        start, stop = parts.pop()
        try:
            decode(raw.slice(start, stop - start))
        except (CorruptData, InvalidRequest):
            if stop - start == 1:
                found.append(start)
            else:
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]
    return found


def _without(raw: Any, bad: list[int], decode: Decode) -> dict[str, Any]:
    """The decoded columns, null in the bad rows."""
    good = sorted(set(range(len(raw))).difference(bad))
    places: list[int | None] = [None] * len(raw)
    for place, row in enumerate(good):
        places[row] = place
    decoded = decode(raw.take(pa.array(good, pa.int64())))
    at = pa.array(places, pa.int64())
    if good:
        return {name: column.take(at) for name, column in decoded.items()}
    return {name: pa.nulls(len(raw), column.type) for name, column in decoded.items()}


def _raw_of(batch: pa.RecordBatch, bad: Mapping[str, list[int]], kind: pa.DataType) -> Any:
    cells: list[bytes | None] = [None] * batch.num_rows
    for name in ("value", "key"):
        for row in bad.get(name, ()):
            cells[row] = batch[name][row].as_py()
    return pa.array(cells, pa.binary()).cast(kind)
