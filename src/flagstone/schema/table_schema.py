"""`TableSchema`: what a schema row holds, and its bytes.

The bytes are a JSON document in one canonical form. Other bytes are damage: a schema that was misread would give wrong
values for every row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.keys.schema import KeyType
from flagstone.lsm.system_rows import SCHEMA_PREFIX
from flagstone.types import MAX_KEY_BYTES

LAYOUT: Final = 1
"""The layout of a document without former schemas."""

_HISTORY_LAYOUT: Final = 2
"""The layout of a document with former schemas, or of a retired one: earlier releases refuse it."""

MAX_VERSIONS: Final = 1_000
MAX_COLUMNS: Final = 10_000
MAX_BYTES: Final = 4 * 1024 * 1024
_MAX_DEPTH: Final = 32
_FORMATS: Final = ("row", "json")

ColumnType = str | tuple[Any, ...]
"""The type of a column: a name such as "int64" or "decimal(10,2)", or for nested types

    ("list", element)   ("map", key, value)   ("struct", (name, type, nullable), …)
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a structured row. Only a nullable column may have nulls."""

    name: str
    type: ColumnType
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name} {type_text(self.type)}{'' if self.nullable else ' not null'}"


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """The value columns of the rows that name this version, in the order in which the rows hold them."""

    number: int
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column | None:
        """The column of that name; None if the version has none."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The columns of the structured rows of a database, or of those under one key prefix.

    A key is `flagstone.keys` of the key columns, after the prefix. A value is `flagstone.values` of the columns of one
    version. The last version is the current one.

    `former` are the schemas that loads with mode `overwrite` or restores replaced, the last one last: a consumer of
    changes may not have read their rows yet. A schema is `retired` if the database stores no structured rows any more:
    it only keeps its numbers, so that no number ever has two meanings.
    """

    key: tuple[Column, ...]
    versions: tuple[SchemaVersion, ...]
    value_format: str = "row"
    former: tuple[TableSchema, ...] = ()
    retired: bool = False

    @property
    def current(self) -> SchemaVersion:
        """The version that reads show, unless they ask for other columns."""
        return self.versions[-1]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The key columns, then the current value columns."""
        return (*self.key, *self.current.columns)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the key columns."""
        return tuple(column.name for column in self.key)

    def find(self, number: int) -> SchemaVersion | None:
        """The version with that number."""
        return next((version for version in self.versions if version.number == number), None)

    @property
    def next_number(self) -> int:
        """The number of the next version: above all that this schema and the former ones have."""
        return max(schema.versions[-1].number for schema in (self, *self.former)) + 1

    def alone(self) -> TableSchema:
        """The schema without the former ones."""
        return replace(self, former=(), retired=False)

    def at(self, number: int) -> TableSchema | None:
        """The schema, this or a former one, that has the version `number`, with all others as former ones."""
        if self.find(number) is not None:
            return replace(self, retired=False)
        for found in reversed(self.former):
            if found.find(number) is not None:
                others = (*(each for each in self.former if each is not found), self.alone())
                return replace(found, former=others)
        return None

    def latest_column(self, name: str) -> Column | None:
        """The value column of that name in the newest version that has one: its type is the widest it ever had."""
        found = (version.column(name) for version in reversed(self.versions))
        return next((column for column in found if column is not None), None)

    def encode(self) -> bytes:
        """The bytes of the schema row."""
        document: dict[str, Any] = {"flagstone_schema": LAYOUT, **_parts(self)}
        if self.former or self.retired:
            document["flagstone_schema"] = _HISTORY_LAYOUT
            document["former"] = [_parts(each) for each in self.former]
            document["retired"] = self.retired
        data = json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
        if len(data) > MAX_BYTES:
            raise InvalidRequest(
                f"the schema has {len(data)} bytes and may have {MAX_BYTES}: use fewer columns, or write all rows "
                "again into another database to forget old versions"
            )
        return data

    @classmethod
    def decode(cls, data: bytes, key: bytes = b"") -> TableSchema:
        """The schema in the row `key`.

        Raises:
            CorruptData: the bytes are not those of a schema.
            InvalidRequest: a newer release of Flagstone wrote the schema.

        """
        where = f"the schema row {key!r}"
        try:
            document: Any = json.loads(data) if len(data) <= MAX_BYTES else {}
            layout = document.get("flagstone_schema") if isinstance(document, dict) else None
            if isinstance(layout, int) and layout > _HISTORY_LAYOUT:
                raise InvalidRequest(
                    f"{where} has layout {layout}, and this release of Flagstone knows {_HISTORY_LAYOUT}: upgrade "
                    "Flagstone"
                )
            if layout not in (LAYOUT, _HISTORY_LAYOUT):
                raise ValueError("it is not a schema document")
            schema = _parsed(document)
            if layout == _HISTORY_LAYOUT:
                former, retired = tuple(_parsed(each) for each in document["former"]), document["retired"]
                schema = replace(schema, former=former, retired=retired is True)
            schema.check()
            if schema.encode() != data:
                raise ValueError("it is not in the canonical form")
        except InvalidRequest as error:
            if "upgrade Flagstone" in str(error):
                raise
            raise CorruptData(f"{where} is damaged: {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptData(f"{where} is damaged: {error}") from None
        return schema

    def check(self) -> None:
        """Raise `InvalidRequest` for a schema that cannot be stored."""
        for each in self.former:
            each.check()
        if self.value_format not in _FORMATS:
            raise InvalidRequest(f"there is no value format {self.value_format!r}; formats are row and json")
        if not self.key:
            raise InvalidRequest("a schema needs at least one key column")
        for column in self.key:
            if not isinstance(column.type, str) or str(KeyType.parse(column.type)) != column.type:
                raise InvalidRequest(f"key column {column.name!r} has the type {type_text(column.type)}")
        numbers = [version.number for version in self.versions]
        whole = all(type(number) is int and number > 0 for number in numbers)
        if not numbers or not whole or sorted(set(numbers)) != numbers or len(numbers) > MAX_VERSIONS:
            raise InvalidRequest("the versions of a schema have ascending numbers from 1")
        for version in self.versions:
            columns = (*self.key, *version.columns)
            names = [column.name for column in columns]
            if len(columns) > MAX_COLUMNS:
                raise InvalidRequest(f"a row has {len(columns)} columns and may have {MAX_COLUMNS}")
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise InvalidRequest(f"there are two columns {twice!r}; rename one")


def schema_key(prefix: bytes = b"") -> bytes:
    """The key of the row with the schema of the rows under `prefix`; an empty prefix is the whole database."""
    key = SCHEMA_PREFIX + prefix
    if len(key) > MAX_KEY_BYTES:
        raise InvalidRequest(
            f"the prefix of a schema has {len(prefix)} bytes and may have {MAX_KEY_BYTES - len(SCHEMA_PREFIX)}"
        )
    return key


def type_text(kind: ColumnType) -> str:
    """The type as a person writes it: `list<int32>`."""
    if isinstance(kind, str):
        return kind
    match kind:
        case ("struct", *fields):
            inside = ", ".join(f"{name}: {type_text(inner)}" for name, inner, _ in fields)
            return f"struct<{inside}>"
        case (name, *inner):
            return f"{name}<{', '.join(map(type_text, inner))}>"
    return str(kind)


def names_text(columns: Sequence[Column]) -> str:
    """The names of columns, for messages."""
    return ", ".join(column.name for column in columns) or "none"


def _parts(schema: TableSchema) -> dict[str, Any]:
    return {
        "format": schema.value_format,
        "key": [_column_document(column) for column in schema.key],
        "versions": [
            [version.number, [_column_document(column) for column in version.columns]]
            for version in schema.versions
        ],
    }


def _parsed(document: Any) -> TableSchema:
    return TableSchema(
        tuple(_parsed_column(each) for each in document["key"]),
        tuple(
            SchemaVersion(number, tuple(_parsed_column(each) for each in columns))
            for number, columns in document["versions"]
        ),
        document["format"],
    )


def _column_document(column: Column) -> list[Any]:
    return [column.name, column.type, column.nullable]


def _parsed_column(document: Any) -> Column:
    name, kind, nullable = document
    if not isinstance(name, str) or not isinstance(nullable, bool):
        raise TypeError("a column is a name, a type, and whether it is nullable")
    return Column(name, _parsed_type(kind), nullable)


def _parsed_type(document: Any, depth: int = 0) -> ColumnType:
    if isinstance(document, str):
        return document
    if not isinstance(document, list) or depth > _MAX_DEPTH:
        raise TypeError("a type is a name or a short list")
    return tuple(_parsed_parts(document, depth))


def _parsed_parts(document: list[Any], depth: int) -> Iterator[Any]:
    head, *rest = document
    if head == "struct":
        yield head
        for name, kind, nullable in rest:
            if not isinstance(name, str) or not isinstance(nullable, bool):
                raise TypeError("a field is a name, a type, and whether it is nullable")
            yield name, _parsed_type(kind, depth + 1), nullable
        return
    if (head, len(rest)) not in {("list", 1), ("map", 2)}:
        raise TypeError(f"there is no nested type {head!r}")
    yield head
    for each in rest:
        yield _parsed_type(each, depth + 1)
