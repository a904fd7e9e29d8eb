"""The options of a change stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from flagstone.errors import InvalidRequest
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.options import (
    ADDRESS_OPTIONS,
    OptionParser,
    ReadOptions,
    check_known,
    parse_flag,
    parse_lifetime,
    parse_positive,
    parse_read_options,
)
from flagstone.types import KeyRange

Starting = Literal["snapshot", "earliest", "latest"] | int
OnOverwrite = Literal["fail", "delete_and_put", "marker"]

SNAPSHOT_LIFETIME: Final = timedelta(days=1)
"""How long the copy of the whole database may take, with all restarts."""

RETENTION_LIFETIME: Final = timedelta(days=7)
"""How long the WAL is kept for a query that does not run. A running query renews it."""

_ONLY_STREAMS: Final = frozenset({
    "allow_gaps", "before", "changes", "consumer", "max_bytes_per_trigger", "max_files_per_trigger",
    "max_rows_per_trigger", "on_overwrite", "pin_lifetime", "starting",
})  # fmt: skip
"""Options that no read has: a data source cannot see whether it is used for a read or for a stream."""

_OF_READS: Final = ADDRESS_OPTIONS | {
    "include_system", "key.columns", "merge_operator", "prefix", "raw", "start", "stop", "value.columns",
    "value.format",
}  # fmt: skip
"""Options with the same meaning as for reads."""

_STREAM: Final = _OF_READS | _ONLY_STREAMS | {"checkpoint_lifetime", "partitions"}
_LIMITS: Final = ("max_rows_per_trigger", "max_files_per_trigger", "max_bytes_per_trigger")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Which changes a stream delivers, and how many in a micro-batch. `read` has what it shares with reads.

    Without a `consumer` the query gets a name of its own. With `retention_lifetime=None` the WAL is kept for a query
    that does not run until its consumer is released.
    """

    read: ReadOptions
    consumer: str | None = None
    starting: Starting = "snapshot"
    partitions: int = 1
    max_rows: int | None = None
    max_files: int | None = None
    max_bytes: int | None = None
    allow_gaps: bool = False
    snapshot_lifetime: timedelta = SNAPSHOT_LIFETIME
    retention_lifetime: timedelta | None = RETENTION_LIFETIME
    before: bool = False
    on_overwrite: OnOverwrite = "fail"

    @property
    def address(self) -> DatabaseAddress:
        """The database."""
        return self.read.address

    @property
    def keys(self) -> KeyRange:
        """The keys whose changes are delivered."""
        return self.read.keys

    @property
    def needs_base(self) -> bool:
        """Whether the state before each micro-batch is needed."""
        return self.before or self.on_overwrite == "delete_and_put"


def is_stream(options: Mapping[str, str]) -> bool:
    """Whether the options are those of a change stream: an option is among them that no read has."""
    return any(name.lower() in _ONLY_STREAMS for name in options)


def parse_stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Raises `InvalidRequest` for options that are unknown, missing or have an invalid value."""
    check_known(options, _STREAM, "a stream of changes")
    take = OptionParser(options)
    if options.get("consumer") == "":
        raise InvalidRequest(
            "option 'consumer' is empty; name the query, or leave the option out: the query then gets a name, which "
            "Spark stores in its checkpoint"
        )
    if take("changes", parse_flag) is False:
        raise InvalidRequest("option 'changes' is false: a stream delivers changes; use spark.read for rows")
    limits = [name for name in _LIMITS if name in options]
    if len(limits) > 1:
        raise InvalidRequest(
            f"the options {limits[0]!r} and {limits[1]!r} exclude each other; keep one of them"
        )
    parsed = StreamOptions(
        read=parse_read_options({name: options[name] for name in options if _is_of_reads(name)}),
        consumer=options.get("consumer"),
        starting=take("starting", _starting) or "snapshot",
        partitions=take("partitions", parse_positive) or 1,
        max_rows=take("max_rows_per_trigger", parse_positive),
        max_files=take("max_files_per_trigger", parse_positive),
        max_bytes=take("max_bytes_per_trigger", parse_positive),
        allow_gaps=take("allow_gaps", parse_flag) or False,
        snapshot_lifetime=take("checkpoint_lifetime", parse_lifetime) or SNAPSHOT_LIFETIME,
        retention_lifetime=_retention_lifetime(options),
        before=take("before", parse_flag) or False,
        on_overwrite=take("on_overwrite", _on_overwrite) or "fail",
    )
    _check_together(parsed)
    return parsed


def _is_of_reads(name: str) -> bool:
    return name.lower() in _OF_READS or name.lower().startswith("store.")


def _check_together(options: StreamOptions) -> None:
    wanted = "before=true" if options.before else "on_overwrite=delete_and_put"
    if options.needs_base and options.starting not in ("snapshot", "latest"):
        raise InvalidRequest(
            f"{wanted} needs the state of the database where the stream begins, which is kept from now on only: use "
            "starting=snapshot or starting=latest"
        )
    if options.allow_gaps and (options.needs_base or options.on_overwrite != "fail"):
        raise InvalidRequest(
            "allow_gaps skips changes, so 'before' and 'on_overwrite' would be wrong with it; keep one of them"
        )


def _on_overwrite(text: str) -> OnOverwrite:
    match text.lower():
        case "fail":
            return "fail"
        case "delete_and_put":
            return "delete_and_put"
        case "marker":
            return "marker"
    raise InvalidRequest("use fail, delete_and_put or marker")


def _retention_lifetime(options: Mapping[str, str]) -> timedelta | None:
    if options.get("pin_lifetime", "").lower() == "unlimited":
        return None
    return OptionParser(options)("pin_lifetime", parse_lifetime) or RETENTION_LIFETIME


def _starting(text: str) -> Starting:
    match text.lower():
        case "snapshot":
            return "snapshot"
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise InvalidRequest("use snapshot, earliest, latest, or the id of a WAL file")
