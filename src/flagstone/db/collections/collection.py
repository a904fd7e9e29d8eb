"""`Collection`: typed rows under one prefix, with the methods of a database and the manners of a mapping."""
# ruff: noqa: SLF001 - the classes of this package use private members of each other

from __future__ import annotations

from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    MutableMapping,
    Sequence,
    ValuesView,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar, cast, overload

from flagstone.db.collections.codecs import Values
from flagstone.db.collections.index import Index, IndexSet, Problem, RowWrite
from flagstone.db.collections.parts import KeyParts
from flagstone.db.collections.views import CollectionItems, CollectionKeys, CollectionValues
from flagstone.db.mapping import NotSupported, pairs_of
from flagstone.db.writer.mapping import BATCH_ROWS, MISSING
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.keys.tuples import AFTER
from flagstone.read.preview import html_preview
from flagstone.types import KeyRange
from flagstone.write.batch import Instant, Ttl, WriteBatch

if TYPE_CHECKING:
    from flagstone.db.read_methods import Reads
    from flagstone.db.reader.reader import DbReader
    from flagstone.db.writer.database import Db
    from flagstone.db.writer.transaction import Snapshot, Transaction
    from flagstone.read.scan import Scan
    from flagstone.write.durability import WriteHandle

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
T = TypeVar("T")

_RETRIES: Final = 1000
"""Many threads may change one entry of an index: all but one of them try again."""

_UPDATE_ROWS: Final = 256
"""How many rows of an indexed collection `update` and `clear` write in one transaction."""


@dataclass(frozen=True)
class Declared:
    """What a collection was declared with: it is the same for all handles."""

    name: str
    parts: KeyParts
    values: Values
    indexes: IndexSet


class Collection(MutableMapping[K, V], Generic[K, V]):
    """Typed rows under one prefix of a database, in the order of their keys; made by `Db.collection`.

    It is a `collections.abc.MutableMapping`, without a length, as a database is. Its keys are
    `flagstone.keys.encode(name, *parts)`. It holds no rows and needs no closing. A write is one of the database; if the
    collection has indexes it is a transaction that changes them, too.
    """

    def __init__(self, handle: Any, declared: Declared) -> None:
        self._handle = handle
        self._declared = declared
        self._parts = declared.parts
        self._values = declared.values

    @property
    def name(self) -> str:
        """The name: the first part of every key."""
        return self._declared.name

    @property
    def range(self) -> KeyRange:
        """The keys of the database that belong to the collection."""
        prefix = self._parts.prefix
        return KeyRange(prefix, prefix + AFTER)

    def within(self, handle: Transaction | Snapshot | DbReader | WriteBatch | Db) -> Collection[K, V]:
        """The same collection, read and written through a transaction, snapshot, reader, batch or database.

        A batch can only be written, and not if the collection has indexes, because changing them takes reads.
        """
        if not isinstance(handle, WriteBatch) and not hasattr(handle, "multi_get"):
            raise InvalidRequest(
                "a collection is used within a transaction, snapshot, reader, batch or database, not within "
                f"{handle!r}"
            )
        return Collection(handle, self._declared)

    # -- reading ------------------------------------------------------------------------------------------

    @overload
    def get(self, key: K, default: None = None) -> V | None: ...
    @overload
    def get(self, key: K, default: V | D) -> V | D: ...
    def get(self, key: K, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        stored = self._reads.get(self._parts.encode(key))
        return default if stored is None else self._decoded(key, stored)

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """The values of many keys in their order, all at one moment."""
        return self._multi_get(keys, None)

    def scan(
        self,
        *parts: Any,
        start: Any = None,
        stop: Any = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[K, V]]:
        """The rows whose keys begin with `parts`, in key order.

        `start` (inclusive) and `stop` (exclusive) bound the part after them, or several parts if they are tuples:
        `orders.scan("eu", start=10, stop=20)`.
        """
        keys = self._range(parts, start, stop)
        scan = self._reads.scan(keys.start, keys.stop, reverse=reverse, limit=limit)
        return map(self._pair, scan)

    def count(self, *parts: Any) -> int:
        """The number of rows whose keys begin with `parts`. Reads all of them."""
        keys = self._range(parts, None, None)
        return self._reads.count(keys.start, keys.stop)

    def approximate_len(self, *parts: Any) -> int:
        """The estimated number of rows whose keys begin with `parts`; see `Db.approximate_len`."""
        keys = self._range(parts, None, None)
        return self._reads.approximate_len(keys.start, keys.stop)

    def keys(self) -> KeysView[K]:
        """The keys in ascending order: lazy, with `in`."""
        return CollectionKeys(self)

    def values(self) -> ValuesView[V]:
        """The values in the order of their keys: lazy."""
        return CollectionValues(self)

    def items(self) -> ItemsView[K, V]:
        """Pairs of key and value in ascending order: lazy, with `in`."""
        return CollectionItems(self)

    def __getitem__(self, key: K) -> V:
        value: Any = self.get(key, MISSING)  # a value may be None
        if value is MISSING:
            raise KeyError(key)
        return cast("V", value)

    def __contains__(self, key: object) -> bool:
        return self._reads.get(self._parts.encode(key)) is not None

    def __iter__(self) -> Iterator[K]:
        return (self._parts.decode(key) for key, _ in self._raw())

    def __reversed__(self) -> Iterator[K]:
        return (self._parts.decode(key) for key, _ in self._raw(reverse=True))

    def __len__(self) -> NoReturn:
        raise NotSupported(
            "the number of rows is not stored; count() reads them all, and approximate_len() estimates it"
        )

    def __bool__(self) -> bool:
        """True, as for a database; `next(iter(collection), None)` tells if it has rows."""
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    # -- writing ------------------------------------------------------------------------------------------

    def put(
        self,
        key: K,
        value: V,
        *,
        ttl: Ttl | None = None,
        expire_at: Instant | None = None,
        await_durable: bool = False,
    ) -> WriteHandle | None:
        """Set `key` to `value`, and change the indexes in the same transaction. See `Db.put`.

        Returns the handle of the write; None within a transaction or batch, which is written later.

        Raises:
            InvalidRequest: key or value have other types, or another row has the same key of a unique index.

        """
        encoded, stored = self._parts.encode(key), self._values.encode(value)
        expiry = {"ttl": ttl, "expire_at": expire_at}
        indexes = self._declared.indexes
        with self._plainly() as plainly:
            handle = self._writes.put(encoded, stored, **expiry) if plainly else None
        if not plainly:
            row = RowWrite(encoded, stored, value, expiry)
            return self._transact(lambda tx: indexes.put(tx, self._declared, row), await_durable)
        return self._settled(handle, await_durable)

    def delete(self, key: K, *, await_durable: bool = False) -> WriteHandle | None:
        """Delete `key`, whether or not it exists, and its entries in the indexes."""
        encoded = self._parts.encode(key)
        with self._plainly() as plainly:
            handle = self._writes.delete(encoded) if plainly else None
        if not plainly:
            return self._transact(
                lambda tx: self._declared.indexes.delete(tx, self._declared, encoded), await_durable
            )
        return self._settled(handle, await_durable)

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value)

    def __delitem__(self, key: K) -> None:
        self.delete(key)

    @overload
    def pop(self, key: K) -> V: ...
    @overload
    def pop(self, key: K, default: V | D) -> V | D: ...
    def pop(self, key: K, default: Any = MISSING) -> Any:
        """Delete `key` and return its value, in one transaction; without the key `default`, or a `KeyError`."""

        def take(tx: Collection[K, V]) -> Any:
            value = tx.get(key, MISSING)
            if value is not MISSING:
                tx.delete(key)
            return value

        value = self._in_transaction(take)
        if value is not MISSING:
            return value
        if default is MISSING:
            raise KeyError(key)
        return default

    def setdefault(self, key: K, default: V) -> V:
        """The value of `key`, which is set to `default` if it does not exist; in one transaction."""

        def put(tx: Collection[K, V]) -> V:
            value: Any = tx.get(key, MISSING)
            if value is MISSING:
                tx.put(key, default)
                return default
            return cast("V", value)

        return self._in_transaction(put)

    def popitem(self, *, last: bool = True) -> tuple[K, V]:
        """Delete the row with the largest key (or the smallest) and return it. Raises `KeyError` if there is none."""

        def take(tx: Collection[K, V]) -> tuple[K, V]:
            item = next(tx.scan(reverse=last, limit=1), None)
            if item is None:
                raise KeyError("there is no row")
            tx.delete(item[0])
            return item

        return self._in_transaction(take)

    def update(self, rows: Any = (), /, **named: V) -> None:
        """Put all rows of a mapping, or of an iterable of pairs, then those named by keywords; see `Db.update`."""
        pairs = chain(pairs_of(rows), named.items())
        if self._is_pending:
            _write_all(self, pairs)
            return
        for chunk in self._chunks(cast("Iterable[tuple[K, V]]", pairs)):
            self._write_rows(chunk)

    def clear(self) -> None:
        """Delete all rows that there are now, in batches; see `Db.clear`."""
        for chunk in self._chunks((self._parts.decode(key), MISSING) for key, _ in self._raw()):
            self._write_rows(chunk)

    # -- indexes ------------------------------------------------------------------------------------------

    def index(self, name: str, of: Callable[[V], Any], *, unique: bool = False) -> Index[K, V]:
        """Declare an index: `of` gives its key for a value. Rows that exist are added to it first.

        `of` returns a part or a tuple of parts; None for a value that is not in the index; a list for several keys. It
        must depend on nothing but the value. From now on each write of the collection changes the index in the same
        transaction. The database remembers its indexes: another program must declare them as well before it writes.

        A crash while rows are added leaves an unfinished index, and the next declaration builds it again.

        Raises:
            InvalidRequest: the handle is not a database, or two rows have the same key of a unique index. The index
                then does not exist, as after any other error of `of`.

        """
        index = Index(name, of, unique=unique, collection=self)
        self._declared.indexes.declare(self, index)
        return index

    def drop_index(self, name: str) -> None:
        """Delete an index with all its entries. Doing it twice is fine."""
        self._declared.indexes.drop(self, name)

    @property
    def indexes(self) -> dict[str, Index[K, V]]:
        """The declared indexes by name."""
        return {name: index.within(self._handle) for name, index in self._declared.indexes.declared.items()}

    def check_indexes(self) -> list[Problem]:
        """Compare all indexes with the rows, at one moment; returns what differs, at most a hundred entries.

        Only writes that went past the collection make a difference: bulk loads, raw writes of its keys.
        """
        return self._declared.indexes.check(self)

    # -- showing ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Collection({self.name!r}, key=({self._parts.described}), {self._handle!r})"

    def _repr_html_(self) -> str:
        return html_preview(repr(self), lambda limit: self.scan(limit=limit))

    # -- inside -------------------------------------------------------------------------------------------

    @property
    def _reads(self) -> Reads:
        if isinstance(self._handle, WriteBatch):
            raise NotSupported("a batch is only written; read through the database, or use a transaction")
        return cast("Reads", self._handle)

    @property
    def _writes(self) -> Any:
        if not hasattr(self._handle, "put"):
            raise NotSupported(f"a {type(self._handle).__name__} is only read; write through the database")
        return self._handle

    @property
    def _is_pending(self) -> bool:
        """Whether writes belong to a transaction or a batch."""
        return not hasattr(self._writes, "run")

    def _plainly(self) -> AbstractContextManager[bool]:
        """Whether a write changes one row only. The indexes stay as they are until the block ends.

        In a transaction they stay so until it commits: the commit depends on the list of indexes.
        """
        indexes = self._declared.indexes
        indexes.refuse_undeclared()
        if not self._is_pending:
            return indexes.held()
        if not isinstance(self._handle, WriteBatch):
            self._handle.mark_read(indexes.key)
        return nullcontext(not indexes.declared)

    def _transact(self, change: Callable[[Any], None], await_durable: bool) -> WriteHandle | None:
        writes = self._writes
        if isinstance(writes, WriteBatch):
            raise NotSupported(
                f"the collection {self.name!r} has indexes, and changing them takes reads; use a transaction"
            )
        if self._is_pending:
            change(writes)
            return None
        _, handle = writes._run(change, retries=_RETRIES, await_durable=await_durable)
        return cast("WriteHandle | None", handle)

    def _settled(self, handle: WriteHandle | None, await_durable: bool) -> WriteHandle | None:
        if handle is not None and await_durable:
            handle.wait()
        return handle

    def _in_transaction(self, fn: Callable[[Collection[K, V]], T]) -> T:
        if self._is_pending:
            return fn(self)
        return cast("T", self._handle.run(lambda tx: fn(self.within(tx)), retries=_RETRIES))

    def _write_rows(self, rows: list[tuple[K, Any]]) -> None:
        """Put the rows, or delete those whose value is missing: in one batch, or in one transaction with indexes."""
        with self._plainly() as plainly:
            if plainly:
                batch = WriteBatch()
                _write_all(self.within(batch), rows)
                self._handle.write(batch)
        if not plainly:
            self._in_transaction(lambda tx: _write_all(tx, rows))

    def _chunks(self, rows: Iterable[tuple[K, Any]]) -> Iterator[list[tuple[K, Any]]]:
        most = _UPDATE_ROWS if self._declared.indexes.declared else BATCH_ROWS // 4
        chunk: list[tuple[K, Any]] = []
        for row in rows:
            chunk.append(row)
            if len(chunk) == most:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _raw(self, *, reverse: bool = False) -> Scan:
        return self._reads.scan(self.range.start, self.range.stop, reverse=reverse)

    def _range(self, parts: tuple[Any, ...], start: Any, stop: Any) -> KeyRange:
        first = self._parts.encode_leading(parts)
        low, high = first, first + AFTER
        if start is not None:
            low = self._parts.encode_leading((*parts, *_several(start)))
        if stop is not None:
            high = self._parts.encode_leading((*parts, *_several(stop)))
        return KeyRange(low, max(low, high))

    def _multi_get(self, keys: Sequence[K], default: Any) -> list[Any]:
        stored = self._reads.multi_get([self._parts.encode(key) for key in keys])
        return [
            default if value is None else self._decoded(key, value)
            for key, value in zip(keys, stored, strict=True)
        ]

    def _pair(self, pair: tuple[bytes, bytes]) -> tuple[K, V]:
        key = self._parts.decode(pair[0])
        return key, self._decoded(key, pair[1])

    def _decoded(self, key: object, stored: bytes) -> V:
        try:
            return cast("V", self._values.decode(stored))
        except FlagstoneError as error:
            error.add_note(f"in the value of the key {key!r} of the collection {self.name!r}")
            raise


def _write_all(rows: Collection[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
    for key, value in pairs:
        if value is MISSING:
            rows.delete(key)
        else:
            rows.put(key, value)


def _several(bound: Any) -> tuple[Any, ...]:
    return bound if isinstance(bound, tuple) else (bound,)
