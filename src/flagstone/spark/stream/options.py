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
    check_known,
    parse_address,
    parse_flag,
    parse_lifetime,
    parse_positive,
)

Starting = Literal["snapshot", "earliest", "latest"] | int

SNAPSHOT_LIFETIME: Final = timedelta(days=1)
"""How long the copy of the whole database may take, with all restarts."""

_STREAM: Final = ADDRESS_OPTIONS | {
    "allow_gaps", "checkpoint_lifetime", "consumer", "include_system", "max_bytes_per_trigger", "max_files_per_trigger",
    "merge_operator", "partitions", "pin_lifetime", "starting",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Which changes a stream delivers, and how many in a micro-batch."""

    address: DatabaseAddress
    consumer: str
    starting: Starting = "snapshot"
    partitions: int = 1
    max_files: int | None = None
    max_bytes: int | None = None
    allow_gaps: bool = False
    include_system: bool = False
    snapshot_lifetime: timedelta = SNAPSHOT_LIFETIME
    retention_lifetime: timedelta | None = None
    merge_operator: str | None = None


def is_stream(options: Mapping[str, str]) -> bool:
    """Whether the options are those of a change stream: only a change stream has a consumer."""
    return "consumer" in options


def parse_stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Raises `InvalidRequest` for options that are unknown, missing or have an invalid value."""
    consumer = options.get("consumer")
    if not consumer:
        raise InvalidRequest(
            "a stream of changes needs the option 'consumer': the name of the retention checkpoint that keeps the WAL "
            "until the stream has read it, one per query"
        )
    check_known(options, _STREAM, "a stream of changes")
    take = OptionParser(options)
    if "max_files_per_trigger" in options and "max_bytes_per_trigger" in options:
        raise InvalidRequest(
            "the options 'max_files_per_trigger' and 'max_bytes_per_trigger' exclude each other; keep one of them"
        )
    return StreamOptions(
        address=parse_address(options),
        consumer=consumer,
        starting=take("starting", _starting) or "snapshot",
        partitions=take("partitions", parse_positive) or 1,
        max_files=take("max_files_per_trigger", parse_positive),
        max_bytes=take("max_bytes_per_trigger", parse_positive),
        allow_gaps=take("allow_gaps", parse_flag) or False,
        include_system=take("include_system", parse_flag) or False,
        snapshot_lifetime=take("checkpoint_lifetime", parse_lifetime) or SNAPSHOT_LIFETIME,
        retention_lifetime=take("pin_lifetime", parse_lifetime),
        merge_operator=options.get("merge_operator"),
    )


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
