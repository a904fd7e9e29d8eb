"""A commit log in a PostgreSQL table, for writers on many machines.

Every operation is a single autocommitted statement, which the server makes durable before it answers. Never turn
off the server's `synchronous_commit`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.store.commit_log import CommitRecord, RecordState, folder_bounds

_SECRET_PARAMETERS: Final = frozenset(["password", "sslpassword"])
_PAGE_ROWS: Final = 1_000


class PostgresCommitLog:
    """A commit log in `table` of the database at `url` (`postgresql+psycopg://…`), created on first use.

    `namespace` separates stores that share a table: give each base store its own. Each process opens its own
    connections on first use, also after a fork.

    Pickles by its arguments. A password in the URL is left out unless `pickle_secrets` is set; the unpickled object
    takes it from the environment of its process (`PGPASSWORD`) or from a password file. No error and no log message
    contains the password.
    """

    def __init__(
        self,
        url: str,
        *,
        table: str = "flagstone_commits",
        namespace: str = "",
        pickle_secrets: bool = False,
    ) -> None:
        self._url = url
        self._table_name = table
        self._namespace = namespace
        self._pickle_secrets = pickle_secrets
        self._withheld = False
        # Connections must not be used in a forked child, not even to close them: those of other pids stay untouched.
        self._sessions: dict[int, _Session] = {}

    def __repr__(self) -> str:
        return f"PostgresCommitLog(table={self._table_name!r}, namespace={self._namespace!r})"

    def __reduce__(self) -> tuple[object, ...]:
        public = self._url if self._pickle_secrets else without_password(self._url)
        withheld = self._withheld or public != self._url
        return (_reopen, (public, self._table_name, self._namespace, self._pickle_secrets, withheld))

    def find(self, destination: str) -> CommitRecord | None:
        session = self._session()
        rows = session.query(session.table.select().where(self._at(session, destination)))
        return rows[0] if rows else None

    def insert(self, record: CommitRecord) -> bool:
        session = self._session()
        values = {"namespace": self._namespace, "destination": record.destination, **_values(record)}
        return session.change(session.insert(session.table).values(values).on_conflict_do_nothing())

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        session = self._session()
        return session.change(session.table.update().where(self._same(session, old)).values(_values(new)))

    def remove(self, record: CommitRecord) -> bool:
        session = self._session()
        return session.change(session.table.delete().where(self._same(session, record)))

    def pending(self, prefix: str) -> list[CommitRecord]:
        session = self._session()
        columns = session.table.c
        return session.query(self._below(session, prefix).where(columns.state == str(RecordState.PENDING)))

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        session = self._session()
        last = ""
        while True:
            after = self._below(session, prefix).where(session.table.c.destination > last)
            page = session.query(after.limit(_PAGE_ROWS))
            yield from page
            if len(page) < _PAGE_ROWS:
                return
            last = page[-1].destination

    def close(self) -> None:
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.engine.dispose()

    def _session(self) -> _Session:
        session = self._sessions.get(os.getpid())
        if session is not None:
            return session
        opened = _Session(self._url, self._table_name, withheld=self._withheld)
        kept = self._sessions.setdefault(os.getpid(), opened)
        if kept is not opened:  # another thread was first
            opened.engine.dispose()
        return kept

    def _at(self, session: _Session, destination: str) -> Any:
        columns = session.table.c
        return (columns.namespace == self._namespace) & (columns.destination == destination)

    def _same(self, session: _Session, record: CommitRecord) -> Any:
        columns = session.table.c
        return (
            self._at(session, record.destination)
            & (columns.version == record.version)
            & (columns.source == record.source)
            & (columns.state == str(record.state))
        )

    def _below(self, session: _Session, prefix: str) -> Any:
        columns = session.table.c
        selected = session.table.select().where(columns.namespace == self._namespace)
        bounds = folder_bounds(prefix)
        if bounds is not None:
            selected = selected.where(columns.destination >= bounds[0], columns.destination < bounds[1])
        return selected.order_by(columns.destination)


class _Session:
    """The engine of one process and its table."""

    def __init__(self, url: str, table_name: str, *, withheld: bool = False) -> None:
        self._secrets = passwords_of(url)
        self._withheld = withheld
        try:
            sql: Any = import_module("sqlalchemy")
            dialect: Any = import_module("sqlalchemy.dialects.postgresql")
            import_module("psycopg")
        except ImportError as error:
            raise InvalidRequest(
                "a PostgreSQL commit log needs: pip install 'flagstone[postgres]'"
            ) from error
        self._errors: Any = sql.exc
        self.insert: Any = dialect.insert
        self.engine: Any = self._connectable(sql, url)
        weakref.finalize(self, _dispose, self.engine, os.getpid()).atexit = False
        text = sql.Text(collation="C")  # code point order, as paths are ordered everywhere else
        self.table: Any = sql.Table(
            table_name,
            sql.MetaData(),
            sql.Column("namespace", text, primary_key=True),
            sql.Column("destination", text, primary_key=True),
            sql.Column("source", text, nullable=False),
            sql.Column("version", sql.BigInteger, nullable=False),
            sql.Column("state", text, nullable=False),
            sql.Column("created_ms", sql.BigInteger, nullable=False),
            sql.Column("token", text),
            sql.Column("replaced", text),
        )
        columns = self.table.c
        sql.Index(
            f"{table_name}_pending",
            columns.namespace,
            columns.destination,
            postgresql_where=columns.state == str(RecordState.PENDING),
        )
        self._create(sql)

    def query(self, statement: Any) -> list[CommitRecord]:
        try:
            with self.engine.connect() as connection:
                return [_record(row) for row in connection.execute(statement).mappings()]
        except self._errors.SQLAlchemyError as error:
            problem = self._explain(error)
        raise problem

    def change(self, statement: Any) -> bool:
        """Whether the statement changed a row. Drivers do not always report row counts, so it returns the row."""
        try:
            with self.engine.connect() as connection:
                touched = connection.execute(statement.returning(self.table.c.version))
                return touched.first() is not None
        except self._errors.SQLAlchemyError as error:
            problem = self._explain(error)
        raise problem

    def _connectable(self, sql: Any, url: str) -> Any:
        try:
            return sql.create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        except (ValueError, self._errors.SQLAlchemyError):
            # The error may quote parts of the password: it is neither repeated nor kept as context.
            pass
        raise InvalidRequest(
            "the URL of the PostgreSQL commit log is malformed; write postgresql://user@host/database, and "
            "percent-encode / : @ ? # in a password"
        )

    def _create(self, sql: Any) -> None:
        # When two processes create the same table at once, one of them fails, even with "if not exists".
        # The advisory lock excludes that; it lasts until the transaction ends.
        transaction = self.engine.execution_options(isolation_level="READ COMMITTED").begin
        try:
            with transaction() as connection:
                lock = sql.func.pg_advisory_xact_lock(sql.func.hashtext(self.table.name))
                connection.execute(sql.select(lock))
                self.table.metadata.create_all(connection)
                return
        except self._errors.SQLAlchemyError as error:
            problem = self._explain(error)
        raise problem

    def _explain(self, error: Exception) -> Exception:
        # The driver's message: SQLAlchemy's quotes the statement and its parameters.
        reason = str(getattr(error, "orig", None) or error).strip()
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        if self._withheld:
            reason += (
                "; the pickled store does not contain the password: set PGPASSWORD or a password file here, or "
                "open the store with pickle_secrets=True"
            )
        if isinstance(error, self._errors.OperationalError | self._errors.InterfaceError):
            return Unavailable(f"PostgreSQL commit log: {reason}")
        return InvalidRequest(f"PostgreSQL commit log: {reason}")


def _dispose(engine: Any, pid: int) -> None:
    """Close the engine of a log that was never closed; not in a forked child, whose sockets are its parent's."""
    if os.getpid() == pid:
        engine.dispose()


def _reopen(url: str, table: str, namespace: str, pickle_secrets: bool, withheld: bool) -> PostgresCommitLog:
    log = PostgresCommitLog(url, table=table, namespace=namespace, pickle_secrets=pickle_secrets)
    log._withheld = withheld  # noqa: SLF001
    return log


def _values(record: CommitRecord) -> dict[str, object]:
    return {
        "source": record.source,
        "version": record.version,
        "state": str(record.state),
        "created_ms": record.created_ms,
        "token": record.token,
        "replaced": record.replaced,
    }


def _record(row: Any) -> CommitRecord:
    return CommitRecord(
        destination=row["destination"],
        source=row["source"],
        version=row["version"],
        state=RecordState(row["state"]),
        created_ms=row["created_ms"],
        token=row["token"],
        replaced=row["replaced"],
    )


def without_password(url: str) -> str:
    """The URL without the password of its user, and without parameters that are passwords."""
    head, question, query = url.partition("?")
    scheme, separator, rest = head.partition("://")
    # The last @ ends the user: a password that contains an @ was not encoded and must be removed whole.
    user, at, host = rest.rpartition("@")
    plain = f"{scheme}{separator}{user.partition(':')[0]}{at}{host}"
    kept = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if not _secret(name)]
    if len(kept) == len(parse_qsl(query, keep_blank_values=True)):
        return f"{plain}{question}{query}"
    return f"{plain}?{urlencode(kept)}" if kept else plain


def passwords_of(url: str) -> tuple[str, ...]:
    """The passwords in the URL, as written and decoded, longest first."""
    head, _, query = url.partition("?")
    user = head.partition("://")[2].rpartition("@")[0]
    written = [user.partition(":")[2]]
    written += [value for name, value in parse_qsl(query, keep_blank_values=True) if _secret(name)]
    found = {form for each in written if each for form in (each, unquote(each))}
    return tuple(sorted(found, key=len, reverse=True))


def _secret(parameter: str) -> bool:
    return parameter.lower() in _SECRET_PARAMETERS
