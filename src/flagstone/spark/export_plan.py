"""What an export is asked for, checked before anything is read or written. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS
from flagstone.spark.options import Place
from flagstone.store.remote_options import SERVICE_OF_SCHEME, parse_remote_url
from flagstone.store.resolve import resolve_database

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BytesAs = Literal["binary", "utf8", "hex", "base64"]

TEXT_FORMATS: Final = ("json", "csv")
"""Those that have no bytes."""

WRITER_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    "csv": {
        "header": "true",
        # Spark would strip texts, and escape quotes as nobody else does.
        "ignoreLeadingWhiteSpace": "false",
        "ignoreTrailingWhiteSpace": "false",
        "escape": '"',
    }
}

_FORMATS: Final = ("parquet", "orc", *TEXT_FORMATS, "avro", "delta")
_MODES: Final = ("error", "append", "overwrite")
_ENCODINGS: Final = ("binary", "utf8", "hex", "base64")
_HADOOP_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}


def check_writing(format: str, mode: str) -> None:  # noqa: A002 - Spark's name for it
    """Raise `InvalidRequest` for a format or mode that there is not."""
    if format not in _FORMATS:
        raise InvalidRequest(f"there is no format {format!r} to export to{_nearest(format, _FORMATS)}")
    if mode not in _MODES:
        raise InvalidRequest(f"there is no mode {mode!r} of an export{_nearest(mode, _MODES)}")


def plan_encodings(
    format: str,  # noqa: A002
    columns: Sequence[str],
    *,
    key_as: BytesAs | None,
    value_as: BytesAs | None,
) -> dict[str, str]:
    """How the bytes of keys and values are written, by column; those that are not wanted are not in it.

    Raises `InvalidRequest` for columns and encodings that cannot be had.
    """
    for name in columns:
        if name not in COLUMNS:
            raise InvalidRequest(f"there is no column {name!r} to export{_nearest(name, COLUMNS)}")
    planned: dict[str, str] = {}
    for name, chosen in (("key", key_as), ("value", value_as)):
        if chosen is not None and chosen not in _ENCODINGS:
            raise InvalidRequest(f"{name}_as is {chosen!r}{_nearest(chosen, _ENCODINGS)}")
        if chosen == "binary" and format in TEXT_FORMATS:
            raise InvalidRequest(
                f"{format} has no bytes; write {name}_as 'base64', 'hex', or 'utf8' if it is text"
            )
        if name in columns:
            planned[name] = chosen or ("base64" if format in TEXT_FORMATS else "binary")
    return planned


def plan_schema(columns: Sequence[str], encodings: Mapping[str, str]) -> str | None:
    """The schema to read with, where texts are wanted: the reader then checks that they are. None: the usual one."""
    if "utf8" not in encodings.values():
        return None
    texts = {
        name: "string not null" if how == "utf8" else "binary not null" for name, how in encodings.items()
    }
    numbers = {"seq": "long not null", "created_ms": "long", "expires_ms": "long"}
    return ", ".join(f"{name} {(texts | numbers)[name]}" for name in columns)


def check_structured(
    key_columns: Sequence[str],
    schema: StructType | str | None,
    columns: Sequence[str],
    encodings: Sequence[BytesAs | None],
) -> None:
    """Raise `InvalidRequest` for a mixture of columns of your own and those of every database."""
    if schema is None:
        raise InvalidRequest(
            f"the columns {', '.join(key_columns)} need types: name all columns with schema='region string, id long'"
        )
    if tuple(columns) != ("key", "value"):
        raise InvalidRequest("columns are those of the schema; leave out the argument `columns`")
    if any(encoding is not None for encoding in encodings):
        raise InvalidRequest("a schema says what keys and values are; leave out key_as and value_as")


def check_apart(place: Place, target: str) -> None:
    """Raise `InvalidRequest` where files would get among the objects of the database, or replace them."""
    store, root = resolve_database(place.path, place.store, place.store_options)
    database, files = _location(f"{store.url.rstrip('/')}/{root}"), _location(target)
    if database[0] == files[0] and (
        files[1].is_relative_to(database[1]) or database[1].is_relative_to(files[1])
    ):
        raise InvalidRequest(
            f"the database is at {place.path}; export to a place that is apart from it, not {target}"
        )


def _location(url: str) -> tuple[str, PurePosixPath]:
    """Which store, and where in it, under the names of Spark's file systems and of ours alike."""
    parts = urlsplit(url)
    scheme = _HADOOP_SCHEMES.get(parts.scheme, parts.scheme)
    if scheme in ("", "file"):
        return "file", PurePosixPath(Path(parts.path if scheme else url).resolve())
    if scheme in SERVICE_OF_SCHEME:
        place = parse_remote_url(f"{scheme}:{url.partition(':')[2]}")
        return f"{place.service} {place.bucket}", PurePosixPath("/", place.prefix)
    return f"{scheme} {parts.netloc}", PurePosixPath(parts.path or "/")


def _nearest(given: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(known)}"
