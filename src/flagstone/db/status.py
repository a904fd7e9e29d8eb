"""What `status()` returns: a dictionary whose entries are also typed attributes. Notebooks show it as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from flagstone.config.fields import suggestion
from flagstone.kernels import FORM
from flagstone.read.preview import html_facts


class Status(dict[str, Any]):
    """The state of an open database as plain values: `status["last_seq"]` or `status.last_seq`; `json` takes it."""

    path: str
    """The path of the database in its store."""
    store: str
    """The URL of the store."""
    state: str
    """A database is "open", "read-only" (see `failure`) or "closed"; a reader "open", "closed" or "failed"."""
    manifest_id: int
    """The id of the newest manifest that this handle has read."""
    last_seq: int
    """The sequence number of the last write, or of the last row that a reader shows."""
    last_l0_seq: int
    """The sequence number up to which all rows are in SSTs."""
    l0_tables: int
    """The number of SSTs in L0."""
    sorted_runs: int
    """The number of sorted runs."""
    cost: dict[str, Any]
    """Requests, bytes and dollars since it was opened; see `flagstone.cost.Cost`."""
    kernels: str
    """"compiled", or "interpreted", which is many times slower."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts, kernels=FORM)

    if not TYPE_CHECKING:  # they know the attributes above

        def __getattr__(self, name: str) -> Any:
            if name in self:
                return self[name]
            raise AttributeError(f"the status has no {name!r}{suggestion(name, self)}")

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"the status has no {name!r}{suggestion(str(name), self)}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def _repr_html_(self) -> str:
        return html_facts(f"{type(self).__name__} of {self['path']!r}", self)


class WriterStatus(Status):
    """The state of a database that is open for writing."""

    failure: str | None
    """Why it is read-only."""
    writer_epoch: int
    """The epoch of this writer."""
    committed_seq: int
    """The sequence number up to which all writes are visible."""
    durable_seq: int
    """The sequence number up to which all writes are on the store."""
    unflushed_bytes: int
    """Bytes in memory that are in no SST."""
    frozen_memtables: int
    """Memtables that wait to become SSTs."""
    writers_paused: bool
    """Whether writes wait for memory."""
    upload_paused: str | None
    """Why memtables are not written to L0 now."""
    pinned_for_long_reads: int
    """The number of scan checkpoints."""
    memory: dict[str, int] | None
    """What the memory budget is used for; None without one."""
    compactor: dict[str, Any] | None
    """The state of the embedded compactor; None without one."""
    garbage_collector: dict[str, Any] | None
    """The state of the embedded garbage collector; None without one."""


class ReaderStatus(Status):
    """The state of a database that is open for reading."""

    mode: str
    """How it follows the database."""
    checkpoint: str | None
    """The id of the checkpoint it shows or holds."""
    checkpoint_expires_s: int | None
    """When that checkpoint expires, in seconds since the epoch."""
    last_wal_id: int | None
    """The last WAL file it has read."""
    memtable_bytes: int
    """Bytes of rows from the WAL in memory."""
    poll_error: str | None
    """Why the last poll failed."""
