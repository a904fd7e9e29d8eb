"""Secondary indexes of a collection: rows that lead from a key of the index to the key of a row.

The entry of a row is `flagstone.keys.encode(None, collection, index, *index key, *row key)`, with an empty value. A
unique index has entries without the row key, which is their value: two transactions that add the same key write the
same entry, so one of them conflicts and finds it.

A row of its own, `encode(None, collection)`, lists the indexes and whether each is complete. It keeps programs that do
not know an index from writing past it.
"""
# ruff: noqa: SLF001 - the classes of this package use private members of each other

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

from flagstone import keys
from flagstone.db.collections.parts import check_name, index_prefix, indexes_key, plain
from flagstone.db.writer.mapping import MISSING
from flagstone.errors import Closed, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.keys.tuples import AFTER
from flagstone.runtime.sync import Lock

if TYPE_CHECKING:
    from flagstone.db.collections.collection import Collection, Declared

K = TypeVar("K")
V = TypeVar("V")

_ROWS_AT_ONCE: Final = 256
_MOST_PROBLEMS: Final = 100
_RETRIES: Final = 1000
_FOREVER: Final = timedelta.max
"""For what must not expire with the default TTL of a database: the list of indexes, entries of rows that do not."""


class UniqueViolation(InvalidRequest):
    """Another row has the same key of a unique index; nothing was written."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry that is missing in an index, or one that fits no row ("stale")."""

    index: str
    kind: Literal["missing", "stale"]
    index_key: tuple[Any, ...]
    key: Any


class RowWrite(NamedTuple):
    """A row to put: its key and value as bytes, the value as an object, and its `ttl` or `expire_at`."""

    key: bytes
    stored: bytes
    value: Any
    expiry: dict[str, Any]


class Index(Generic[K, V]):
    """A secondary index of a collection; made by `Collection.index`."""

    def __init__(
        self, name: str, of: Callable[[V], Any], *, unique: bool, collection: Collection[K, V]
    ) -> None:
        self._name = check_name(name, "index")
        self._unique = unique
        self._of = of
        self._collection = collection
        self._prefix = index_prefix(collection.name, name)

    @property
    def name(self) -> str:
        """The name of the index."""
        return self._name

    @property
    def unique(self) -> bool:
        """Whether a key of the index belongs to one row at most."""
        return self._unique

    def within(self, handle: Any) -> Index[K, V]:
        """The same index, read through a transaction, snapshot, reader or database."""
        return Index(self.name, self._of, unique=self.unique, collection=self._collection.within(handle))

    def scan(
        self,
        *parts: Any,
        start: Any = None,
        stop: Any = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[K, V]]:
        """The rows whose keys in the index begin with `parts`, in the order of the index; all at one moment.

        `start` and `stop` bound the next part, as in `Collection.scan`.
        """
        with _steady(self._collection._handle) as handle:
            index, rows = self.within(handle), self._collection.within(handle)
            entries = index._entries(parts, start, stop, reverse=reverse, limit=limit)
            while chunk := list(islice(entries, _ROWS_AT_ONCE)):
                found = [key for _, key in chunk]
                for key, value in zip(found, rows._multi_get(found, MISSING), strict=True):
                    if value is MISSING:
                        raise CorruptData(
                            f"the index {self.name!r} has an entry for the key {key!r}, which has no row: rows were "
                            "deleted without the collection; drop the index and declare it again"
                        )
                    yield key, value

    def keys(self, *parts: Any, reverse: bool = False, limit: int | None = None) -> Iterator[K]:
        """The keys of these rows."""
        return (key for _, key in self._entries(parts, None, None, reverse=reverse, limit=limit))

    def values(self, *parts: Any, reverse: bool = False, limit: int | None = None) -> Iterator[V]:
        """The values of these rows."""
        return (value for _, value in self.scan(*parts, reverse=reverse, limit=limit))

    def get(self, parts: Any, default: Any = None) -> Any:
        """The value of the first row with this key of the index, or `default`."""
        return next(self.values(*_parts(parts), limit=1), default)

    def count(self, *parts: Any) -> int:
        """The number of entries whose keys begin with `parts`. Reads all of them."""
        low = self._prefix + keys.encode(tuple(map(plain, parts)))
        return int(self._collection._reads.count(low, low + AFTER))

    def __getitem__(self, parts: Any) -> V:
        """The value of the only row with this key; for unique indexes."""
        if not self.unique:
            raise InvalidRequest(f"the index {self.name!r} is not unique: use scan(), keys() or values()")
        value = self.get(parts, MISSING)
        if value is MISSING:
            raise KeyError(parts)
        return cast("V", value)

    def __contains__(self, parts: object) -> bool:
        return next(self.keys(*_parts(parts), limit=1), None) is not None

    def __repr__(self) -> str:
        return f"Index({self.name!r}{', unique' if self.unique else ''}, of {self._collection!r})"

    def _entries_of(self, row_key: bytes, value: V) -> dict[bytes, bytes]:
        """The entries of a row, as keys and values; `row_key` is without the prefix of the collection."""
        given = self._of(value)
        several = given if isinstance(given, list) else [] if given is None else [given]
        entries = {}
        for each in several:
            try:
                encoded = self._prefix + keys.encode(_parts(each))
            except InvalidRequest as problem:
                raise InvalidRequest(f"the index {self.name!r}: {problem}") from None
            if self.unique:
                entries[encoded] = row_key
            else:
                entries[encoded + row_key] = b""
        return entries

    def _split(self, entry: bytes, stored: bytes) -> tuple[tuple[Any, ...], bytes]:
        """The index key and the row key (without its prefix) of an entry."""
        parts = keys.decode(entry[len(self._prefix) :])
        if self.unique:
            return parts, stored
        own = len(self._collection._parts.parts)
        return parts[:-own], keys.encode(parts[-own:])

    def _entries(
        self, parts: tuple[Any, ...], start: Any, stop: Any, *, reverse: bool, limit: int | None
    ) -> Iterator[tuple[tuple[Any, ...], K]]:
        """The index keys and the row keys of entries."""
        low = self._prefix + keys.encode(tuple(map(plain, parts)))
        high = low + AFTER
        if start is not None:
            low = self._prefix + keys.encode((*map(plain, parts), *_parts(start)))
        if stop is not None:
            high = self._prefix + keys.encode((*map(plain, parts), *_parts(stop)))
        shape = self._collection._parts
        for entry, stored in self._collection._reads.scan(low, max(low, high), reverse=reverse, limit=limit):
            index_key, row_key = self._split(entry, stored)
            yield index_key, shape.decode(shape.prefix + row_key)


class IndexSet:
    """The indexes of one collection, shared by all its handles in this process.

    `declared` are those that each write changes. `undeclared` are those that the database has and the program has not
    declared: writes are refused. Both change only under the lock that a plain write holds.
    """

    def __init__(self, collection: str, stored: bytes | None) -> None:
        self.collection: str = collection
        self.key: bytes = indexes_key(collection)
        """The key of the row that lists them."""
        self.declared: dict[str, Index[Any, Any]] = {}
        self.undeclared: frozenset[str] = frozenset(_listed(stored))
        self._lock = Lock()

    @contextmanager
    def held(self) -> Iterator[bool]:
        """For a write to one row: whether there is no index, which stays so until the block ends."""
        with self._lock:
            yield not self.declared

    def refuse_undeclared(self) -> None:
        """Raise `InvalidRequest` if a write would leave an index wrong."""
        if self.undeclared:
            names = sorted(self.undeclared)
            raise InvalidRequest(
                f"the collection {self.collection!r} has the index {names[0]!r}, which this program has not declared: "
                f"declare it with index({names[0]!r}, …) before writing, or drop_index({names[0]!r})"
            )

    def declare(self, rows: Collection[Any, Any], index: Index[Any, Any]) -> None:
        """Register the index, add the rows that exist, and mark it as complete."""
        db = _database(rows)
        with self._lock:
            listed = _listed(db.get(self.key))
            known = listed.get(index.name)
            if known is not None and known["unique"] != index.unique:
                raise InvalidRequest(
                    f"the index {index.name!r} exists and is{'' if known['unique'] else ' not'} unique: declare it "
                    "so, or drop it first"
                )
            complete = known is not None and known["complete"]
            if not complete:
                self._write_listed(db, {**listed, index.name: _entry(index, complete=False)})
            self.declared = {**self.declared, index.name: index}
            self.undeclared -= {index.name}
        if complete:
            return
        try:
            _delete_entries(db, index._prefix)
            for chunk in _chunks(rows):
                self._add_all(db, rows, index, chunk)
        except (Unavailable, Closed, TransactionConflict):
            raise  # as after a crash: the next declaration begins again
        except Exception:
            # Two rows have one key, or `of` fails for a row, which then could not be written again.
            self.drop(rows, index.name)
            raise
        with self._lock:
            listed = _listed(db.get(self.key))
            self._write_listed(db, {**listed, index.name: _entry(index, complete=True)})

    def drop(self, rows: Collection[Any, Any], name: str) -> None:
        """Stop changing an index, and delete its entries. A crash leaves an unfinished index, or none."""
        db = _database(rows)
        with self._lock:
            listed = _listed(db.get(self.key))
            if name in listed:
                self._write_listed(db, {**listed, name: {**listed[name], "complete": False}})
            self.declared = {each: index for each, index in self.declared.items() if each != name}
            self.undeclared -= {name}
        _delete_entries(db, index_prefix(rows.name, name))
        with self._lock:
            listed = _listed(db.get(self.key))
            self._write_listed(db, {each: entry for each, entry in listed.items() if each != name})

    def put(self, tx: Any, declared: Declared, row: RowWrite) -> None:
        """Put a row and change all indexes, in a transaction."""
        tx.mark_read(self.key)
        row_key = row.key[len(declared.parts.prefix) :]
        before = tx.get(row.key)
        old = None if before is None else declared.values.decode(before)
        for index in self.declared.values():
            former = {} if before is None else index._entries_of(row_key, old)
            entries = index._entries_of(row_key, row.value)
            for entry in former.keys() - entries.keys():
                tx.delete(entry)
            for entry, target in entries.items():
                self._check_free(tx, declared, index, entry, target)
                tx.put(entry, target, **row.expiry)
        tx.put(row.key, row.stored, **row.expiry)

    def delete(self, tx: Any, declared: Declared, key: bytes) -> None:
        """Delete a row and its entries, in a transaction."""
        tx.mark_read(self.key)
        before = tx.get(key)
        if before is not None:
            row_key, old = key[len(declared.parts.prefix) :], declared.values.decode(before)
            for index in self.declared.values():
                for entry in index._entries_of(row_key, old):
                    tx.delete(entry)
        tx.delete(key)

    def check(self, rows: Collection[Any, Any]) -> list[Problem]:
        """What differs between the declared indexes and the rows, at one moment."""
        problems: list[Problem] = []
        with _steady(rows._handle) as handle:
            seen = rows.within(handle)
            for name, index in self.declared.items():
                problems += islice(
                    _problems(seen, index.within(handle), name), _MOST_PROBLEMS - len(problems)
                )
        return problems

    def _write_listed(self, db: Any, listed: dict[str, dict[str, bool]]) -> None:
        if listed:
            db.put(self.key, json.dumps({"indexes": listed}, sort_keys=True).encode(), ttl=_FOREVER)
        else:
            db.delete(self.key)

    def _add_all(
        self, db: Any, rows: Collection[Any, Any], index: Index[Any, Any], chunk: list[bytes]
    ) -> None:
        """Add rows in one transaction; after a conflict in two, so that busy rows do not hold up the others."""
        try:
            db.run(lambda tx: self._add(tx, rows, index, chunk), retries=0 if len(chunk) > 1 else _RETRIES)
        except TransactionConflict:
            middle = len(chunk) // 2
            if not middle:
                raise
            self._add_all(db, rows, index, chunk[:middle])
            self._add_all(db, rows, index, chunk[middle:])

    def _add(self, tx: Any, rows: Collection[Any, Any], index: Index[Any, Any], chunk: list[bytes]) -> None:
        """Add rows to an index, as they are now. A row that was deleted meanwhile has no entry."""
        declared = rows._declared
        for key in chunk:
            row = tx.get_row(key)
            if row is None:
                continue
            tx.mark_read(key)
            expiry = {"ttl": _FOREVER} if row.expires_ms is None else {"expire_at": row.expires_ms}
            entries = index._entries_of(key[len(declared.parts.prefix) :], declared.values.decode(row.value))
            for entry, target in entries.items():
                self._check_free(tx, declared, index, entry, target)
                tx.put(entry, target, **expiry)

    def _check_free(
        self, tx: Any, declared: Declared, index: Index[Any, Any], entry: bytes, target: bytes
    ) -> None:
        if not index.unique:
            return
        taken = tx.get(entry)
        if taken is not None and taken != target:
            other = declared.parts.decode(declared.parts.prefix + taken)
            raise UniqueViolation(
                f"the unique index {index.name!r} of the collection {declared.name!r} has this key for the row "
                f"{other!r} already; nothing was written"
            )


def _problems(rows: Collection[Any, Any], index: Index[Any, Any], name: str) -> Iterator[Problem]:
    parts, reads = rows._parts, rows._reads
    for key, value in rows.scan():
        row_key = parts.encode(key)[len(parts.prefix) :]
        entries = index._entries_of(row_key, value)
        for (entry, target), found in zip(entries.items(), reads.multi_get(list(entries)), strict=True):
            if found != target:
                yield Problem(name, "missing", index._split(entry, target)[0], key)
    low = index._prefix
    for entry, stored in reads.scan(low, low + AFTER):
        index_key, row_key = index._split(entry, stored)
        key = parts.decode(parts.prefix + row_key)
        value = rows.get(key, MISSING)
        if value is MISSING or entry not in index._entries_of(row_key, value):
            yield Problem(name, "stale", index_key, key)


def _parts(given: Any) -> tuple[Any, ...]:
    return tuple(map(plain, given)) if isinstance(given, tuple) else (plain(given),)


def _database(rows: Collection[Any, Any]) -> Any:
    handle = rows._handle
    if not hasattr(handle, "run"):
        raise InvalidRequest(
            f"declare and drop indexes with the collection of a database, not of a {handle!r}"
        )
    return handle


@contextmanager
def _steady(handle: Any) -> Iterator[Any]:
    """A handle that shows one moment: a snapshot of a database; any other handle itself."""
    if not hasattr(handle, "snapshot"):
        yield handle
        return
    with handle.snapshot() as snapshot:
        yield snapshot


def _listed(stored: bytes | None) -> dict[str, dict[str, bool]]:
    if stored is None:
        return {}
    try:
        found: dict[str, dict[str, bool]] = json.loads(stored)["indexes"]
    except (ValueError, KeyError, TypeError):
        raise CorruptData("the row that lists the indexes of a collection is damaged") from None
    return found


def _entry(index: Index[Any, Any], *, complete: bool) -> dict[str, bool]:
    return {"unique": index.unique, "complete": complete}


def _chunks(rows: Collection[Any, Any]) -> Iterator[list[bytes]]:
    keys_of_rows = (key for key, _ in rows._raw())
    while chunk := list(islice(keys_of_rows, _ROWS_AT_ONCE)):
        yield chunk


def _delete_entries(db: Any, prefix: bytes) -> None:
    entries = (entry for entry, _ in db.scan(prefix, prefix + AFTER))
    while chunk := list(islice(entries, _ROWS_AT_ONCE)):
        with db.batch() as batch:
            for entry in chunk:
                batch.delete(entry)
