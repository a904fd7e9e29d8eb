"""`export`: write a database at a checkpoint as files, with Spark's own writers."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit
from uuid import UUID

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from flagstone.config.durations import as_duration
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.read.arrow import COLUMNS
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.spark.address import DatabaseAddress, shared_address
from flagstone.spark.error_translation import find_cause
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.job_control import described, log_done, per_second
from flagstone.spark.options import option_texts, parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.sessions import register
from flagstone.spark.stored_schema import is_raw, plan_types
from flagstone.store.remote_options import SERVICE_OF_SCHEME, nearest, parse_remote_url
from flagstone.store.resolve import resolve_database

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

BytesAs = Literal["binary", "utf8", "hex", "base64"]

DEFAULT_LIFETIME: Final = timedelta(days=1)
"""If an export takes longer, garbage collection may delete its SSTs."""

_FORMATS: Final = ("parquet", "orc", "json", "csv", "avro", "delta")
_TEXT_FORMATS: Final = ("json", "csv")
_MODES: Final = ("error", "append", "overwrite")
_ENCODINGS: Final = ("binary", "utf8", "hex", "base64")
_HADOOP_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
_WRITER_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    "csv": {
        "header": "true",
        # Spark's defaults strip white space and escape quotes with a backslash; most CSV readers expect neither.
        "ignoreLeadingWhiteSpace": "false",
        "ignoreTrailingWhiteSpace": "false",
        "escape": '"',
    },
}
_MICROSECONDS: Final = {
    # Spark's defaults leave out what is below a millisecond.
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """A finished export. `bytes` counts the keys and values that were read; it is 0 with `key_columns`.

    `encodings` names the encoding of every column of bytes: binary, utf8, hex or base64.
    """

    target: str
    format: str
    rows: int
    bytes: int
    seconds: float
    encodings: Mapping[str, str]

    @property
    def rows_per_s(self) -> float:
        """Rows written per second."""
        return per_second(self.rows, self.seconds)


def export(
    spark: SparkSession,
    url: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str = "parquet",  # noqa: A002 - Spark's name for it
    mode: Literal["error", "append", "overwrite"] = "error",
    columns: Sequence[str] | None = None,
    raw: bool = False,
    key_as: BytesAs | None = None,
    value_as: BytesAs | None = None,
    key_columns: Sequence[str] = (),
    value_columns: Sequence[str] | None = None,
    value_format: Literal["row", "json"] | None = None,
    schema: StructType | str | None = None,
    start: bytes | None = None,
    stop: bytes | None = None,
    prefix: bytes | None = None,
    checkpoint: UUID | str | None = None,
    as_of: int | datetime | None = None,
    partitions: int | None = None,
    include_expired: bool = False,
    include_system: bool = False,
    merge_operator: str | None = None,
    lifetime: timedelta | str = DEFAULT_LIFETIME,
    store: str | None = None,
    store_options: Mapping[str, Any] | None = None,
    wal_store: str | None = None,
    options: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write the database, or a key range of it, as files to `target`, an address that Spark can write to.

    `format` is parquet, orc, json or csv; avro and delta if Spark has them. `options` are options of Spark's writer.
    If the database stores a schema, the files have its columns, or those of them that `columns` names. Otherwise, and
    with `raw`, `columns` are some of key, value, seq, created_ms and expires_ms. Bytes stay bytes in binary formats and
    become base64 in json and csv, unless `key_as` and `value_as` are `utf8` (an error for bytes that are not text),
    `hex` or `base64`; either of them reads bytes. Rows of a database without a stored schema have the columns that were
    loaded with `key_columns` and `schema` (see docs/keys.md). System rows are left out unless `include_system`.

    The files show the state at the call, at `checkpoint`, or at `as_of`. Without `checkpoint`, the export creates one
    for at most `lifetime` and deletes it at the end. `partitions` is the number of tasks and of files. Each file is in
    key order.

    After an error or a crash `target` is as Spark's writer leaves it: without `_SUCCESS`, and with mode "overwrite"
    without its former contents. The database is never changed.

    Raises:
        InvalidRequest: an argument is wrong, there is no such database, or `target` exists already.
        Unavailable: the store did not answer.

    """
    where = os.fspath(target)
    held_for = as_duration(lifetime, "lifetime", minimum=timedelta(seconds=1))
    address = shared_address(url, store=store, store_options=store_options, wal_store=wal_store)
    check_choice("format", format, _FORMATS)
    check_choice("mode", mode, _MODES)
    check_apart(address, where)
    mapped = bool(key_columns) or schema is not None
    if mapped:
        check_mapped(columns, (key_as, value_as))
    wanted = {
        "path": address.path,
        "store": address.store,
        "wal_store": address.wal_store,
        "columns": columns,
        "raw": raw or any(each is not None for each in (key_as, value_as)),
        "key.columns": key_columns or None,
        "value.columns": value_columns,
        "value.format": value_format if key_columns else None,
        "start": start,
        "stop": stop,
        "prefix": prefix,
        "checkpoint": checkpoint,
        "as_of": as_of,
        "partitions": partitions,
        "include_expired": include_expired,
        "include_system": include_system,
        "merge_operator": merge_operator,
        "checkpoint_lifetime": held_for,
        **{f"store.{name}": given for name, given in address.store_options.items()},
    }
    started = SYSTEM_CLOCK.monotonic()
    register(spark)
    held = hold_checkpoint(parse_read_options(option_texts(wanted)), owned=True)
    encodings: dict[str, str] = {}
    try:
        if schema is None:
            types = plan_types(held.options, held.table)
            mapped = held.table is not None and not is_raw(types.fieldNames(), held.table)
            schema = types
        if not mapped:
            columns = ("key", "value") if columns is None else columns
            encodings = plan_encodings(format, columns, key_as=key_as, value_as=value_as)
            schema = plan_schema(columns, encodings)
        with described(spark, f"export {address.name} to {format}"):
            # A read with a checkpoint creates no other one.
            reader = spark.read.format("flagstone").options(**option_texts({**wanted, **held.option_values}))
            frame = reader.schema(schema).load()
            if mapped and format in _TEXT_FORMATS:
                encodings = {
                    field.name: "base64" for field in frame.schema if isinstance(field.dataType, BinaryType)
                }
            sized = [] if mapped else [name for name in ("key", "value") if name in frame.columns]
            size = sum((F.octet_length(name) for name in sized), start=F.lit(0))
            seen = Observation()  # counts rows and bytes while Spark writes
            rows = frame.observe(seen, F.count(F.lit(1)).alias("rows"), F.sum(size).alias("bytes"))
            rows = rows.select(*(_encoded(name, encodings.get(name)) for name in frame.columns))
            texts = _MICROSECONDS if format in _TEXT_FORMATS else {}
            writer = rows.write.format(format).mode(mode).options(**texts, **_WRITER_DEFAULTS.get(format, {}))
            writer.options(**(options or {})).save(where)
    except PySparkException as error:
        raise _translated(error) from error
    finally:
        if checkpoint is None and held.checkpoint is not None:
            # If this fails, the checkpoint expires; the outcome of the export matters more.
            with suppress(FlagstoneError):
                address.admin().delete_checkpoint(held.checkpoint)
    report = ExportReport(
        target=where,
        format=format,
        rows=int(seen.get["rows"]),
        bytes=int(seen.get["bytes"] or 0),
        seconds=SYSTEM_CLOCK.monotonic() - started,
        encodings=encodings,
    )
    log_done(
        "exported",
        database=address.name,
        format=format,
        rows=report.rows,
        bytes=report.bytes,
        seconds=report.seconds,
    )
    return report


def check_choice(what: str, given: str, known: Collection[str]) -> None:
    """Raise `InvalidRequest` unless `given` is one of `known`."""
    if given not in known:
        raise InvalidRequest(f"an export has no {what} {given!r}{nearest(given, frozenset(known))}")


def plan_encodings(
    format: str,  # noqa: A002
    columns: Sequence[str],
    *,
    key_as: BytesAs | None,
    value_as: BytesAs | None,
) -> dict[str, str]:
    """The encodings of the columns with bytes. Raises `InvalidRequest` if the format does not support one."""
    for name in columns:
        check_choice("column", name, COLUMNS)
    text = format in _TEXT_FORMATS
    for name, chosen in (("key_as", key_as), ("value_as", value_as)):
        if chosen is not None:
            check_choice(name, chosen, _ENCODINGS)
        if chosen == "binary" and text:
            raise InvalidRequest(f"{format} has no bytes; use {name} 'base64', 'hex', or 'utf8' for text")
    default = "base64" if text else "binary"
    chosen_by_column = {"key": key_as or default, "value": value_as or default}
    return {name: encoding for name, encoding in chosen_by_column.items() if name in columns}


def plan_schema(columns: Sequence[str], encodings: Mapping[str, str]) -> StructType:
    """The schema to read with: columns of encoding utf8 are strings, so that the reader checks them."""
    return StructType(
        [
            StructField(field.name, StringType(), field.nullable)
            if encodings.get(field.name) == "utf8"
            else field
            for field in read_schema(columns)
        ]
    )


def check_mapped(columns: Sequence[str] | None, encodings: Sequence[BytesAs | None]) -> None:
    """Raise `InvalidRequest` for arguments that exclude `key_columns` and `schema`."""
    if columns is not None:
        raise InvalidRequest("columns are those of the schema; leave out the argument `columns`")
    if any(encoding is not None for encoding in encodings):
        raise InvalidRequest("the schema gives keys and values their types; leave out key_as and value_as")


def check_apart(address: DatabaseAddress, target: str) -> None:
    """Raise `InvalidRequest` if the files would mix with the objects of the database, or replace them."""
    store, root = resolve_database(address.path, address.store, address.store_options)
    database, files = _location(f"{store.url.rstrip('/')}/{root}"), _location(target)
    if database[0] == files[0] and (
        files[1].is_relative_to(database[1]) or database[1].is_relative_to(files[1])
    ):
        raise InvalidRequest(
            f"the target {target} overlaps the database at {address.path}; export to a folder outside of it"
        )


def _location(url: str) -> tuple[str, PurePosixPath]:
    """The store of a URL and the path in it; the same store for `s3a://` of Spark and `s3://`."""
    parts = urlsplit(url)
    scheme = _HADOOP_SCHEMES.get(parts.scheme, parts.scheme)
    if scheme in ("", "file"):
        return "file", PurePosixPath(Path(parts.path if scheme else url).resolve())
    if scheme in SERVICE_OF_SCHEME:
        remote = parse_remote_url(f"{scheme}:{url.partition(':')[2]}")
        return f"{remote.service} {remote.bucket}", PurePosixPath("/", remote.prefix)
    return f"{scheme} {parts.netloc}", PurePosixPath(parts.path or "/")


def _encoded(name: str, encoding: str | None) -> Column:
    column = F.col(f"`{name}`")
    if encoding == "hex":
        return F.lower(F.hex(column)).alias(name)
    if encoding == "base64":
        return F.translate(F.base64(column), "\r\n", "").alias(name)  # Spark breaks it into lines
    return column


def _translated(error: PySparkException) -> Exception:
    """The Flagstone error inside Spark's; `InvalidRequest` for a plan that Spark refuses; else the error itself."""
    own = find_cause(str(error))
    if own is not None:
        return own
    refused = isinstance(error, AnalysisException)
    return InvalidRequest(f"Spark cannot do this: {str(error).splitlines()[0]}") if refused else error
