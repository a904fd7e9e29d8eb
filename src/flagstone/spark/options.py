"""The options of the data source: strings from Spark, checked and typed before the first access to the store."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from flagstone.config import Settings
from flagstone.config.durations import format_duration, parse_duration
from flagstone.db.reader.pinned import PinnedState
from flagstone.errors import InvalidRequest
from flagstone.format.codec import Codec
from flagstone.format.filter import BloomPolicy
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.read.arrow import COLUMNS
from flagstone.schema.commit import SchemaCommit
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.condition_text import parse_option
from flagstone.spark.conditions import Condition
from flagstone.spark.hadoop_options import is_hadoop_option, store_options
from flagstone.spark.malformed import MalformedRows, parse_malformed
from flagstone.sst.builder import SstOptions
from flagstone.store.remote_options import OptionValue, nearest
from flagstone.types import KeyRange
from flagstone.values import FORMATS

if TYPE_CHECKING:
    from flagstone.spark.row_mapping import RowMapping

DEFAULT_LIFETIME: Final = timedelta(minutes=10)
"""Of the checkpoint of a plain load. Tasks renew it while they read."""

DEFAULT_HAND_OVER_TIMEOUT: Final = timedelta(seconds=90)
"""More than the minute in which a writer finds the manifest after GC deleted manifests that it had not seen."""

DEFAULT_PARTITION_BYTES: Final = 128 * 1024 * 1024
DEFAULT_SST_BYTES: Final = 256 * 1024 * 1024

_STORE_PREFIX: Final = "store."
ADDRESS_OPTIONS: Final = frozenset({"path", "store", "wal_store"})
_ROW_MAPPING: Final = frozenset({"key.columns", "raw", "value.columns", "value.format"})
_READ: Final = ADDRESS_OPTIONS | _ROW_MAPPING | {
    "as_of", "batch_rows", "checkpoint", "checkpoint_lifetime", "columnnameofcorruptrecord", "columns",
    "include_expired", "include_system", "keys", "merge_operator", "mode", "parallelism", "partition_bytes",
    "partitions", "prefix", "pushdown", "schema.of", "snapshot", "start", "state", "stop", "stored_schema",
    "task_limit", "where",
}  # fmt: skip
WRITE_OPTIONS: Final = ADDRESS_OPTIONS | _ROW_MAPPING | {
    "compression_codec", "duplicates", "filter_bits_per_key", "hand_over_timeout", "key.prefix", "key_column",
    "load_id", "max_sst_size", "min_filter_keys", "only_if_new", "receipt", "schema.commit", "segment_extractor",
    "sorted", "sst_block_size", "value_column",
}  # fmt: skip
_HEX: Final = "hex:"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Which rows and columns a DataFrame shows. `keys` is a range, `points` are single keys.

    With `pushdown`, filters of Spark narrow the keys further. None allows this if this Spark keeps scans apart.
    `raw` reads bytes where the database has a schema. `given` are the columns that the reader named, if any. A clone of
    a key range may lack the schema of its rows; `schema_of` is the path of a database that has it.
    `where` selects rows as well. `stored_schema` has the types of all columns in keys and values, if the schema of the
    read has only some of them. With snapshot "latest" no checkpoint keeps the state. A task ends after `task_limit`
    rows.
    """

    address: DatabaseAddress
    columns: tuple[str, ...] = ("key", "value")
    keys: KeyRange = field(default_factory=KeyRange)
    points: tuple[bytes, ...] | None = None
    pushdown: bool | None = None
    checkpoint: str | None = None
    as_of: int | datetime | None = None
    lifetime: timedelta = DEFAULT_LIFETIME
    partitions: int | None = None
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    batch_rows: int | None = None
    include_expired: bool = False
    merge_operator: str | None = None
    row_mapping: RowMapping | None = None
    raw: bool = False
    given: tuple[str, ...] | None = None
    prefix: bytes | None = None
    include_system: bool = False
    schema_of: str | None = None
    malformed: MalformedRows = field(default_factory=MalformedRows)
    where: tuple[Condition, ...] = ()
    stored_schema: str | None = None
    snapshot: str = "checkpoint"
    state: PinnedState | None = None
    parallelism: int | None = None
    task_limit: int | None = None

    def load_merge_operator(self) -> MergeOperator | None:
        """The operator named as `module:name`, imported where it is used."""
        return None if self.merge_operator is None else _imported(self.merge_operator, "merge_operator")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a DataFrame becomes SSTs.

    With `in_order` the last row of a key is the one from the last task; otherwise tasks have no order. A writer that
    has the database open has `hand_over_timeout` to adopt the load.
    """

    address: DatabaseAddress
    key_column: str = "key"
    value_column: str = "value"
    duplicates: str = "last"
    presorted: bool = False
    in_order: bool = False
    max_sst_bytes: int = DEFAULT_SST_BYTES
    sst_options: SstOptions = field(default_factory=SstOptions)
    hand_over_timeout: timedelta = DEFAULT_HAND_OVER_TIMEOUT
    receipt: str | None = None
    row_mapping: RowMapping | None = None
    value_format: str | None = None
    raw: bool = False
    key_prefix: bytes = b""
    schema_commit: SchemaCommit | None = None
    load_id: UUID | None = None
    segment_extractor: str | None = None
    only_if_new: bool = False

    def load_segment_extractor(self) -> SegmentExtractor | None:
        """The extractor named as `module:name`, imported where it is used."""
        name = self.segment_extractor
        return None if name is None else _imported(name, "segment_extractor")

    @property
    def planned_schema(self) -> SchemaCommit | None:
        """What the commit does with the schema, whether the tasks encode the rows or `bulk_load` has encoded them."""
        return self.schema_commit if self.row_mapping is None else self.row_mapping.commit


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises `InvalidRequest` for options that are unknown, contradictory or have an invalid value."""
    check_known(options, _READ, "reading")
    take = OptionParser(options)
    prefix, start, stop = (take("prefix", key_bytes), take("start", key_bytes), take("stop", key_bytes))
    keys = KeyRange(start or None, stop)
    if start is not None and stop is not None and start > stop:
        raise InvalidRequest(
            f"the range from {start!r} to {stop!r} is inverted; start must not be above stop"
        )
    columns = take("columns", _columns)
    return ReadOptions(
        address=parse_address(options),
        columns=("key", "value") if columns is None else columns,
        given=columns,
        raw=take("raw", parse_flag) or False,
        prefix=prefix,
        include_system=take("include_system", parse_flag) or False,
        schema_of=options.get("schema.of"),
        malformed=parse_malformed(options),
        keys=keys if prefix is None else keys.intersect(KeyRange.of_prefix(prefix)),
        points=take("keys", _points),
        pushdown=take("pushdown", parse_flag),
        checkpoint=options.get("checkpoint"),
        as_of=take("as_of", _moment),
        lifetime=take("checkpoint_lifetime", parse_lifetime) or DEFAULT_LIFETIME,
        partitions=take("partitions", parse_positive),
        partition_bytes=take("partition_bytes", parse_positive) or DEFAULT_PARTITION_BYTES,
        batch_rows=take("batch_rows", parse_positive),
        include_expired=take("include_expired", parse_flag) or False,
        merge_operator=options.get("merge_operator"),
        row_mapping=_parse_row_mapping(options),
        where=take("where", parse_option) or (),
        stored_schema=options.get("stored_schema"),
        snapshot=take("snapshot", _snapshot) or "checkpoint",
        state=take("state", PinnedState.parse),
        parallelism=take("parallelism", parse_positive),
        task_limit=take("task_limit", parse_positive),
    )


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises `InvalidRequest` for options that are unknown or have an invalid value."""
    check_known(options, WRITE_OPTIONS, "writing")
    take = OptionParser(options)
    duplicates = options.get("duplicates", "last")
    if duplicates not in ("last", "error"):
        raise InvalidRequest(f"option 'duplicates' is 'last' or 'error', not {duplicates!r}")
    chosen = {
        name: options[name]
        for name in ("compression_codec", "filter_bits_per_key", "min_filter_keys", "sst_block_size")
        if name in options
    }
    if "compression_codec" in chosen:
        chosen["compression_codec"] = _codec_name(chosen["compression_codec"])
    settings = Settings.from_dict({name: _setting(value) for name, value in chosen.items()})
    bits = settings.filter_bits_per_key
    codec = settings.compression_codec
    return WriteOptions(
        address=parse_address(options),
        key_column=options.get("key_column", "key"),
        value_column=options.get("value_column", "value"),
        duplicates=duplicates,
        hand_over_timeout=take("hand_over_timeout", parse_lifetime) or DEFAULT_HAND_OVER_TIMEOUT,
        presorted=take("sorted", parse_flag) or False,
        max_sst_bytes=take("max_sst_size", parse_positive) or DEFAULT_SST_BYTES,
        sst_options=SstOptions(
            block_bytes=settings.sst_block_size,
            codec=Codec.NONE if codec is None else Codec[codec.upper()],
            min_filter_keys=settings.min_filter_keys,
            filters=() if bits is None else (BloomPolicy(bits),),
        ),
        receipt=options.get("receipt"),
        raw=take("raw", parse_flag) or False,
        value_format=options.get("value.format"),
        key_prefix=take("key.prefix", key_bytes) or b"",
        schema_commit=take("schema.commit", SchemaCommit.from_text),
        row_mapping=_parse_row_mapping(options),
        load_id=take("load_id", UUID),
        segment_extractor=options.get("segment_extractor"),
        only_if_new=take("only_if_new", parse_flag) or False,
    )


def key_bytes(text: str) -> bytes:
    """The key in an option: `hex:00ff` in hexadecimal, any other text in UTF-8."""
    if not text.startswith(_HEX):
        return text.encode()
    try:
        return bytes.fromhex(text.removeprefix(_HEX))
    except ValueError:
        raise InvalidRequest(f"{text!r} is not hexadecimal; write for instance hex:00ff") from None


def key_text(key: bytes) -> str:
    """The option text of a key, which `key_bytes` parses."""
    return _HEX + key.hex()


def option_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Python values as strings for Spark's options; None values are left out."""
    return {name: _option_text(value) for name, value in values.items() if value is not None}


def _option_text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case bytes():
            return key_text(value)
        case datetime():
            return value.isoformat()
        case timedelta():
            return format_duration(value)
        case list() | tuple():
            plain = all("," not in name and name == name.strip() for name in value)
            return ",".join(value) if plain else json.dumps(value)
        case _:
            return str(value)


class OptionParser:
    """Parses single options; its errors name the option."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def __call__(self, name: str, parse: Callable[[str], T]) -> T | None:
        text = self._options.get(name)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise InvalidRequest(f"option {name!r} is {text!r}: {error}") from None


def parse_address(options: Mapping[str, str]) -> DatabaseAddress:
    """The address of the database. Raises `InvalidRequest` without the option `path`."""
    path = options.get("path")
    if not path:
        raise InvalidRequest(
            "there is no path to a database; give it in load(...) or save(...), or as option 'path'"
        )
    own: dict[str, OptionValue] = dict(store_options(options, options.get("store") or path))
    own |= {
        name.lower().removeprefix(_STORE_PREFIX): value
        for name, value in options.items()
        if name.lower().startswith(_STORE_PREFIX)
    }
    return DatabaseAddress(path, options.get("store"), options.get("wal_store"), own)


def check_known(options: Mapping[str, str], known: frozenset[str], doing: str) -> None:
    """Raise `InvalidRequest` for an unknown option; the error suggests the nearest known one."""
    for name in options:
        plain = name.lower()
        if plain not in known and not plain.startswith(_STORE_PREFIX) and not is_hadoop_option(plain):
            raise InvalidRequest(f"{doing} has no option {name!r}{nearest(plain, known)}")


def _parse_row_mapping(options: Mapping[str, str]) -> RowMapping | None:
    if "key.columns" not in options:
        unused = [name for name in ("value.columns", "value.format") if name in options]
        if unused:
            raise InvalidRequest(f"option {unused[0]!r} needs 'key.columns', the columns that make the key")
        return None
    if options.get("raw", "").lower() == "true":
        raise InvalidRequest(
            "option 'raw' is for bytes and 'key.columns' for structured rows; keep one of them"
        )
    from flagstone.spark.row_mapping import RowMapping  # noqa: PLC0415 - needs PySpark

    chosen = options.get("value.columns")
    form = options.get("value.format", "row")
    if form not in FORMATS:
        raise InvalidRequest(f"option 'value.format' is {form!r}; formats are {', '.join(FORMATS)}")
    return RowMapping(_names(options["key.columns"]), None if chosen is None else _names(chosen), form)


def _snapshot(text: str) -> str:
    if text.lower() not in ("checkpoint", "latest"):
        raise InvalidRequest("use checkpoint or latest")
    return text.lower()


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas; or a JSON list, for names with commas or spaces at their ends."""
    if text.lstrip().startswith("["):
        found = json.loads(text)
        if not all(isinstance(name, str) for name in found):
            raise InvalidRequest("a list of columns holds names in quotes")
        return tuple(found)
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _points(text: str) -> tuple[bytes, ...]:
    """Keys separated by commas. A key with a comma must be written as `hex:`."""
    return tuple(key_bytes(part.strip()) for part in text.split(",") if part.strip())


def _columns(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names or len(set(names)) < len(names):
        raise InvalidRequest(
            f"choose from {', '.join(COLUMNS)}, or from the columns of the schema, each once"
        )
    return names


def _moment(text: str) -> int | datetime:
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest("use a sequence number, or a time like 2026-01-31T12:00:00+00:00") from None
    if moment.tzinfo is None:
        raise InvalidRequest("a time needs its zone, as in 2026-01-31T12:00:00+00:00")
    return moment


def parse_positive(text: str) -> int:
    """A whole number from 1. Raises `InvalidRequest` for anything else."""
    if not text.isdigit() or int(text) < 1:
        raise InvalidRequest("use a whole number from 1")
    return int(text)


def parse_lifetime(text: str) -> timedelta:
    """A duration such as "90s" or "1h", from one second. Raises `InvalidRequest` for anything else."""
    lasting = parse_duration(text)
    if lasting < timedelta(seconds=1):
        raise InvalidRequest("use at least 1s")
    return lasting


def parse_flag(text: str) -> bool:
    """True or false. Raises `InvalidRequest` for anything else."""
    if text.lower() not in ("true", "false"):
        raise InvalidRequest("use true or false")
    return text.lower() == "true"


def _codec_name(text: str) -> str:
    """The codec as settings spell it; "none" in any case is no compression."""
    known = {codec.title.lower(): codec.title for codec in Codec if codec is not Codec.NONE}
    return "null" if text.lower() == "none" else known.get(text.lower(), text)


def _setting(text: str) -> Any:
    """The value as in a settings file: numbers and null are not strings."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _imported(name: str, option: str) -> Any:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise InvalidRequest(f"option {option!r} is {name!r}; write module:name")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(
            f"the {option.replace('_', ' ')} {name!r} cannot be imported: {error}; its module must be installed on "
            "every executor"
        ) from error
    return found() if isinstance(found, type) else found
