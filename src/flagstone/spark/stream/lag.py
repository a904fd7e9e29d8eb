"""How far a consumer of changes is behind: for the progress of a query, and for `stream_status`. Decisions are pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flagstone.changes.change import WalFile
from flagstone.errors import InvalidRequest
from flagstone.loads.edit import loads_ahead
from flagstone.metadata.annotations import Position, held_retentions
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.spark.address import open_manifests, shared_address
from flagstone.spark.stream.rows import wal_files
from flagstone.store.remote_options import OptionValue


@dataclass(frozen=True, slots=True)
class Lag:
    """What a consumer has not read. `oldest_ms` is when the first of these WAL files was written."""

    end: int
    files: int
    bytes: int
    loads: int
    oldest_ms: int | None

    def seconds(self, now_ms: int) -> float:
        """The age of the oldest change in a WAL file that the consumer has not read."""
        return 0.0 if self.oldest_ms is None else max(now_ms - self.oldest_ms, 0) / 1000

    def report(self, now_ms: int) -> dict[str, int]:
        """The lag as Spark shows it in the progress of a query: whole numbers by name."""
        return {
            "wal_id": self.end,
            "files_behind": self.files,
            "bytes_behind": self.bytes,
            "loads_behind": self.loads,
            "seconds_behind": int(self.seconds(now_ms)),
        }


def measure_lag(files: Sequence[WalFile], manifest: Manifest, position: Position) -> Lag:
    """The lag at the position, from a listing of the WAL files and a manifest."""
    left = [file for file in files if file.wal_id >= position.next_id and file.size]
    return Lag(
        end=max([position.next_id, *(file.wal_id + 1 for file in files)]),
        files=len(left),
        bytes=sum(file.size for file in left),
        loads=len(loads_ahead(manifest, position)),
        oldest_ms=left[0].last_modified_ms if left else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """A consumer of changes as the database knows it.

    `next_wal_id` and `after_seq` are its position: the next WAL file, and the last sequence number before it. A running
    query saves its position every ten seconds. `expires` is when the changes are no longer kept for it.
    """

    consumer: str
    next_wal_id: int
    after_seq: int
    files_behind: int
    bytes_behind: int
    loads_behind: int
    seconds_behind: float
    expires: datetime | None


def stream_status(
    url: str | os.PathLike[str],
    consumer: str,
    *,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: str | None = None,
) -> StreamStatus:
    """How far the consumer is behind, and until when changes are kept for it. Two requests and a listing.

    `consumer` is the option of the stream; for a query without that option it is the name in its offsets. Consumers of
    other programs (`open_feed`, `WalReader`) have a status as well.

    Raises:
        InvalidRequest: there is no such consumer; the message names those there are.

    """
    address = shared_address(url, store=store, store_options=store_options, wal_store=wal_store)
    manifest = open_manifests(address).require_latest().value
    held = {each.name: each for each in held_retentions(manifest)}
    found = held.get(consumer)
    if found is None:
        known = ", ".join(map(repr, sorted(held))) or "none"
        raise InvalidRequest(
            f"{address.path} keeps no changes for a consumer {consumer!r}: it never began, was released, or has "
            f"expired; there are: {known}"
        )
    position = found.position
    lag = measure_lag(list(wal_files(address).files(position.next_id)), manifest, position)
    expires_s = found.checkpoint.expires_s
    return StreamStatus(
        consumer=consumer,
        next_wal_id=position.next_id,
        after_seq=position.after_seq,
        files_behind=lag.files,
        bytes_behind=lag.bytes,
        loads_behind=lag.loads,
        seconds_behind=lag.seconds(SYSTEM_CLOCK.now_ms()),
        expires=None if expires_s is None else datetime.fromtimestamp(expires_s, UTC),
    )
