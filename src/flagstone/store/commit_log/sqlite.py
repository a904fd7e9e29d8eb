"""A commit log in one SQLite file, for all processes of one machine.

Every operation is a single autocommitted statement. In SQLite's WAL mode with `synchronous=FULL` it is on the
disk before it returns, so a commit survives power loss. A process that is killed leaves the statement either
applied or not.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.sync import Lock
from flagstone.store.commit_log import CommitRecord, RecordState, folder_bounds

Synchronous = Literal["FULL", "NORMAL", "OFF"]

_CREATE_TABLE: Final = """
create table if not exists commits (
  destination text primary key, source text not null, version integer not null, state text not null,
  created_ms integer not null, token text, replaced text
) without rowid
"""
_CREATE_INDEX: Final = (
    "create index if not exists pending_commits on commits (destination) where state = 'pending'"
)
_COLUMNS: Final = "destination, source, version, state, created_ms, token, replaced"
_SETTERS: Final = "source = ?, version = ?, state = ?, created_ms = ?, token = ?, replaced = ?"
_SAME: Final = "destination = ? and version = ? and source = ? and state = ?"
_PAGE_ROWS: Final = 1_000
_BUSY_PAUSE_S: Final = 0.01
_PRIMARY_CODE: Final = 0xFF
"""The lowest byte of an extended error code of SQLite is the primary code."""

_Answer = TypeVar("_Answer")


class _Handle:
    """One connection with the lock that guards it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.lock = Lock()
        self.connection = connection
        weakref.finalize(self, _close, connection, os.getpid()).atexit = False


class SqliteCommitLog:
    """A commit log in the SQLite database at `path`, created on first use.

    Pickles by path. Each process opens its own connection on first use, also after a fork.
    `synchronous="NORMAL"` is several times faster, but power loss may lose the last commits, and then an
    acknowledged creation could be granted twice: use it for tests only.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, synchronous: Synchronous = "FULL", busy_timeout_s: float = 30.0
    ) -> None:
        self._path = Path(path).absolute()
        self._synchronous: Synchronous = synchronous
        self._busy_timeout_s = busy_timeout_s
        # A connection must not be used in a forked child, not even to close it: those of other pids stay untouched.
        self._handles: dict[int, _Handle] = {}
        self._opening: dict[int, Lock] = {}

    def __repr__(self) -> str:
        return f"SqliteCommitLog({str(self._path)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (str(self._path), self._synchronous, self._busy_timeout_s))

    def find(self, destination: str) -> CommitRecord | None:
        rows = self._query(f"select {_COLUMNS} from commits where destination = ?", (destination,))  # noqa: S608
        return _record(rows[0]) if rows else None

    def insert(self, record: CommitRecord) -> bool:
        return self._change(
            f"insert into commits ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing",  # noqa: S608
            (record.destination, *_values(record)),
        )

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        return self._change(
            f"update commits set {_SETTERS} where {_SAME}",  # noqa: S608
            (*_values(new), *_identity(old)),
        )

    def remove(self, record: CommitRecord) -> bool:
        return self._change(f"delete from commits where {_SAME}", _identity(record))  # noqa: S608

    def pending(self, prefix: str) -> list[CommitRecord]:
        return [_record(row) for row in self._below(prefix, "state = 'pending'")]

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        last = ""
        while True:
            rows = self._below(prefix, "destination > ?", last, limit=_PAGE_ROWS)
            for row in rows:
                yield _record(row)
            if len(rows) < _PAGE_ROWS:
                return
            last = str(rows[-1][0])

    def close(self) -> None:
        handle = self._handles.pop(os.getpid(), None)
        if handle is not None:
            with handle.lock:
                handle.connection.close()

    def _below(
        self, prefix: str, condition: str, *values: object, limit: int = -1
    ) -> list[tuple[object, ...]]:
        bounds = folder_bounds(prefix)
        inside = "" if bounds is None else " and destination >= ? and destination < ?"
        return self._query(
            f"select {_COLUMNS} from commits where {condition}{inside} order by destination limit ?",  # noqa: S608
            (*values, *(bounds or ()), limit),
        )

    def _query(self, statement: str, values: Sequence[object]) -> list[tuple[object, ...]]:
        handle = self._handle()
        try:
            with handle.lock:
                return self._while_busy(lambda: handle.connection.execute(statement, values).fetchall())
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _change(self, statement: str, values: Sequence[object]) -> bool:
        handle = self._handle()
        try:
            with handle.lock:
                return self._while_busy(lambda: handle.connection.execute(statement, values).rowcount) == 1
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _handle(self) -> _Handle:
        handle = self._handles.get(os.getpid())
        if handle is not None:
            return handle
        # Only one thread of a process connects: opening and dropping another connection disturbs the others.
        with self._opening.setdefault(os.getpid(), Lock()):
            handle = self._handles.get(os.getpid())
            if handle is None:
                try:
                    handle = _Handle(self._connect())
                except sqlite3.Error as error:
                    raise self._explain(error) from error
                self._handles[os.getpid()] = handle
        return handle

    def _connect(self) -> sqlite3.Connection:
        if not self._path.parent.is_dir():
            raise InvalidRequest(f"the folder of the commit log does not exist: {self._path.parent}")
        connection = sqlite3.connect(
            self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            self._while_busy(lambda: self._set_up(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        # Changing the mode takes every lock, so it is done for a new file only.
        if connection.execute("pragma journal_mode").fetchone() != ("wal",):
            connection.execute("pragma journal_mode = wal")
        connection.execute(f"pragma synchronous = {self._synchronous}")
        connection.execute(_CREATE_TABLE)
        connection.execute(_CREATE_INDEX)

    def _while_busy(self, request: Callable[[], _Answer]) -> _Answer:
        """Repeat a request that finds the file locked, until the busy timeout.

        SQLite itself waits for locks, but gives up at once where waiting could be a deadlock: when the file changes
        to WAL mode, and when another process closes the last connection to it.
        """
        deadline = SYSTEM_CLOCK.monotonic() + self._busy_timeout_s
        while True:
            try:
                return request()
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & _PRIMARY_CODE in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                if not busy or SYSTEM_CLOCK.monotonic() >= deadline:
                    raise
                SYSTEM_CLOCK.sleep(_BUSY_PAUSE_S)

    def _explain(self, error: sqlite3.Error) -> Exception:
        if isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError):
            return Unavailable(f"commit log {self._path}: {error}")
        return CorruptData(str(error), object=str(self._path))


def _close(connection: sqlite3.Connection, pid: int) -> None:
    """Close the connection of a log that was never closed; not in a forked child, which does not own it."""
    if os.getpid() == pid:
        connection.close()


def _reopen(path: str, synchronous: Synchronous, busy_timeout_s: float) -> SqliteCommitLog:
    return SqliteCommitLog(path, synchronous=synchronous, busy_timeout_s=busy_timeout_s)


def _values(record: CommitRecord) -> tuple[object, ...]:
    return (
        record.source,
        record.version,
        str(record.state),
        record.created_ms,
        record.token,
        record.replaced,
    )


def _identity(record: CommitRecord) -> tuple[object, ...]:
    return (record.destination, record.version, record.source, str(record.state))


def _record(row: Sequence[object]) -> CommitRecord:
    destination, source, version, state, created_ms, token, replaced = row
    return CommitRecord(
        destination=str(destination),
        source=str(source),
        version=int(str(version)),
        state=RecordState(str(state)),
        created_ms=int(str(created_ms)),
        token=None if token is None else str(token),
        replaced=None if replaced is None else str(replaced),
    )
