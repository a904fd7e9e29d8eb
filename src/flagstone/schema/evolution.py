"""Which rows fit a stored schema, and what the schema is after they were written. Pure.

Columns are compared by name. A name keeps its meaning for ever: its type may only become wider, and a column that was
dropped may only come back with the same type or a wider one. Nothing is guessed: rows that lack one column and have
another new one could mean a rename, so they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.schema.history import with_former
from flagstone.schema.table_schema import (
    MAX_VERSIONS,
    Column,
    ColumnType,
    SchemaVersion,
    TableSchema,
    names_text,
    type_text,
)

_WIDER: Final = (
    ("int8", "int16", "int32", "int64"),
    ("uint8", "uint16", "uint32", "uint64"),
    ("float32", "float64"),
)
"""Types that hold every value of the types before them."""


@dataclass(frozen=True, slots=True)
class GivenColumns:
    """The columns of rows to write: of the key in order, and of the value in any order."""

    key: tuple[Column, ...]
    value: tuple[Column, ...]
    value_format: str = "row"


@dataclass(frozen=True, slots=True)
class Evolution:
    """The schema after the rows were written, the version that they must name, and what changed, in words."""

    schema: TableSchema
    version: SchemaVersion
    changes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the commit of the rows must also write the schema."""
        return bool(self.changes)


def plan_evolution(
    stored: TableSchema | None, given: GivenColumns, *, replaces_all: bool = False
) -> Evolution:
    """Decide how rows with the given columns are written into a database with the stored schema.

    The same columns in any order, or columns of the same name and type, need no new version. New nullable columns,
    wider numbers and missing columns make one. With `replaces_all` the rows replace everything, so any columns fit. The
    schema then keeps the replaced one as a former schema, and continues its numbers: no number ever has two meanings.

    Raises:
        InvalidRequest: the rows do not fit; the message names what differs and what to do.

    """
    if stored is None or stored.retired or replaces_all:
        return _new_schema(stored, given)
    _check_key(stored, given)
    current = stored.current
    by_name = {column.name: column for column in given.value}
    if len(by_name) < len(given.value):
        raise InvalidRequest(f"the rows have two columns of one name: {names_text(given.value)}; rename one")
    for name in by_name:
        if name in stored.key_names:
            raise InvalidRequest(
                f"column {name!r} is in the key and in the value; remove it from one of them"
            )
    missing = [column for column in current.columns if column.name not in by_name]
    added = [column for column in given.value if current.column(column.name) is None]
    if missing and added:
        raise InvalidRequest(
            f"the rows lack {_quoted(missing)} and have the new {_quoted(added)}: a column is never renamed or "
            "swapped. Keep its name; or, if you mean it, write rows without the old column first, and then rows with "
            "the new one"
        )
    kept = [_kept(column, by_name[column.name]) for column in current.columns if column.name in by_name]
    kept += [_added(stored, column) for column in added]
    changes = [
        *(f"added {column}" for column in added),
        *(f"dropped {column.name}" for column in missing),
        *(
            f"widened {column.name} to {type_text(column.type)}"
            for column in kept
            if (before := current.column(column.name)) is not None and before.type != column.type
        ),
    ]
    if not changes:
        return Evolution(stored, current)
    if len(stored.versions) >= MAX_VERSIONS:
        raise InvalidRequest(
            f"the schema has had {MAX_VERSIONS} versions, which is the most: write all rows again with "
            "mode 'overwrite', or into another database"
        )
    version = SchemaVersion(stored.next_number, tuple(kept))
    replace(stored, versions=(version,), former=()).check()  # the others were checked when they were new
    return Evolution(replace(stored, versions=(*stored.versions, version)), version, tuple(changes))


def widens(narrow: ColumnType, wide: ColumnType) -> bool:
    """Whether every value of `narrow` is also one of `wide`; both are the same or `wide` is a wider number."""
    if narrow == wide or loosened(narrow) == wide:
        return True
    return any(
        narrow in family and wide in family and family.index(str(narrow)) < family.index(str(wide))
        for family in _WIDER
    )


def loosened(kind: ColumnType) -> ColumnType:
    """The type with nullable fields in all its structs: it holds every value of `kind`, with the same bytes."""
    match kind:
        case ("struct", *fields):
            return "struct", *((name, loosened(inner), True) for name, inner, _ in fields)
        case (name, *inner):
            return name, *(loosened(each) for each in inner)
    return kind


_READS_AS: Final = {
    ("uint8", "int16"),
    ("uint16", "int32"),
    ("uint32", "int64"),
    ("uint64", "decimal(20,0)"),
    ("float16", "float32"),
    ("float16", "float64"),
    ("date64", "date"),
    *(
        (f"{kind}[{unit}]", f"{kind}[us]")
        for kind in ("timestamp", "timestamp_ntz")
        for unit in ("s", "ms", "ns")
    ),
}
"""What a reader may ask for besides wider numbers: types for programs that lack the stored one, such as Spark."""


def plan_projection(schema: TableSchema, wanted: Sequence[Column]) -> None:
    """Check the columns that a reader names against the stored ones, by name.

    A reader may leave columns out, name columns that were dropped, and ask for wider numbers.

    Raises:
        InvalidRequest: there is no such column, or its values do not fit the wanted type.

    """
    for column in wanted:
        known = next((each for each in schema.key if each.name == column.name), None)
        known = known or schema.latest_column(column.name)
        if known is None:
            raise InvalidRequest(
                f"the database has no column {column.name!r}; it has {names_text(schema.columns)}"
            )
        fixed = isinstance(known.type, str) and known.type.startswith("fixed[") and column.type == "binary"
        if not widens(known.type, column.type) and (known.type, column.type) not in _READS_AS and not fixed:
            raise InvalidRequest(
                f"column {column.name!r} is stored as {type_text(known.type)} and cannot be read as "
                f"{type_text(column.type)}: read it as {type_text(known.type)} and cast it"
            )


def _new_schema(stored: TableSchema | None, given: GivenColumns) -> Evolution:
    """The schema of rows that replace all others, or that are the first ones."""
    if stored is None:
        version = SchemaVersion(1, given.value)
    elif _is_current(stored, given):
        version = stored.current
    else:
        version = SchemaVersion(stored.next_number, given.value)
    schema = TableSchema(given.key, (version,), given.value_format)
    schema.check()
    if stored is None:
        return Evolution(schema, version, ("created",))
    replaced = [replace(stored, former=())] if version != stored.current or len(stored.versions) > 1 else []
    return Evolution(with_former(schema, [*stored.former, *replaced]), version, ("replaced",))


def _is_current(stored: TableSchema, given: GivenColumns) -> bool:
    """Whether rows with the given columns are rows of the current version."""
    same_rows = (stored.key, stored.value_format) == (given.key, given.value_format)
    columns = {column.name: column for column in given.value}
    return same_rows and columns == {column.name: column for column in stored.current.columns}


def _check_key(stored: TableSchema, given: GivenColumns) -> None:
    if given.value_format != stored.value_format:
        raise InvalidRequest(
            f"the database holds values of the format {stored.value_format!r}, and the rows were given for "
            f"{given.value_format!r}: use {stored.value_format!r}"
        )
    names = tuple(column.name for column in given.key)
    if names != stored.key_names:
        raise InvalidRequest(
            f"the key columns are {', '.join(stored.key_names)}, in this order, and the rows were given with "
            f"{', '.join(names)}: name the same columns, or leave the key columns out"
        )
    for known, column in zip(stored.key, given.key, strict=True):
        if known.type != column.type:
            raise InvalidRequest(_differs("key column", known, column))


def _kept(known: Column, given: Column) -> Column:
    """The column with the type of the given one. Raises `InvalidRequest` unless that is the same or wider."""
    if not widens(known.type, given.type):
        raise InvalidRequest(_differs("column", known, given))
    return replace(known, type=given.type)


def _added(stored: TableSchema, column: Column) -> Column:
    """A column that the current version lacks."""
    dropped = stored.latest_column(column.name)
    if dropped is not None:
        return _kept(dropped, column)
    if not column.nullable:
        raise InvalidRequest(
            f"the new column {column.name!r} is not nullable, but the rows in the database have no value for it: "
            "declare it nullable"
        )
    return column


def _differs(what: str, known: Column, given: Column) -> str:
    return (
        f"{what} {known.name!r} is stored as {type_text(known.type)}, and the rows have {type_text(given.type)}: cast "
        f"it to {type_text(known.type)}, or give it another name"
    )


def _quoted(columns: Sequence[Column]) -> str:
    return f"column{'s' if len(columns) > 1 else ''} {', '.join(repr(column.name) for column in columns)}"
