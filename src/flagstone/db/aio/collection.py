"""`AsyncCollection` and `AsyncIndex`: the methods of `Collection` and `Index`, awaited.

Reads of single keys await the database. Everything else runs the blocking method on another thread, so that a
transaction that waits does not delay the event loop.
"""
# ruff: noqa: SLF001 - the classes use private members of their blocking twins

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flagstone.db.collections.collection import Collection
from flagstone.db.collections.index import Index, Problem
from flagstone.db.writer.mapping import MISSING
from flagstone.write.batch import Instant, Ttl, WriteBatch

if TYPE_CHECKING:
    from flagstone.db.aio.read_methods import AsyncReads
    from flagstone.types import KeyRange
    from flagstone.write.durability import WriteHandle

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class AsyncCollection(Generic[K, V]):
    """Typed rows under one prefix of a database; see `Collection`. Made by `AsyncDb.collection`."""

    def __init__(self, handle: Any, collection: Collection[K, V]) -> None:
        self._handle = handle
        self._collection = collection

    @property
    def name(self) -> str:
        """The name: the first part of every key."""
        return self._collection.name

    @property
    def range(self) -> KeyRange:
        """The keys of the database that belong to the collection."""
        return self._collection.range

    def within(self, handle: AsyncReads | WriteBatch) -> AsyncCollection[K, V]:
        """The same collection, read and written through a transaction, snapshot, reader, batch or database."""
        blocking: Any = handle if isinstance(handle, WriteBatch) else handle._reads
        return AsyncCollection(handle, self._collection.within(blocking))

    async def get(self, key: K, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        stored = await self._handle.get(self._collection._parts.encode(key))
        return default if stored is None else self._collection._decoded(key, stored)

    async def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """The values of many keys in their order, all at one moment."""
        return await asyncio.to_thread(self._collection.multi_get, keys)

    async def scan(
        self,
        *parts: Any,
        start: Any = None,
        stop: Any = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[tuple[K, V]]:
        """The rows whose keys begin with `parts`, for `async for`; see `Collection.scan`."""
        keys = self._collection._range(parts, start, stop)
        async for pair in self._handle.scan(keys.start, keys.stop, reverse=reverse, limit=limit):
            yield self._collection._pair(pair)

    async def keys(self) -> AsyncIterator[K]:
        """The keys in ascending order, for `async for`."""
        async for key, _ in self.scan():
            yield key

    async def values(self) -> AsyncIterator[V]:
        """The values in the order of their keys, for `async for`."""
        async for _, value in self.scan():
            yield value

    def items(self) -> AsyncIterator[tuple[K, V]]:
        """Pairs of key and value in ascending order, for `async for`."""
        return self.scan()

    def __aiter__(self) -> AsyncIterator[K]:
        return self.keys()

    async def count(self, *parts: Any) -> int:
        """The number of rows whose keys begin with `parts`. Reads all of them."""
        return await asyncio.to_thread(self._collection.count, *parts)

    async def approximate_len(self, *parts: Any) -> int:
        """The estimated number of rows whose keys begin with `parts`."""
        return await asyncio.to_thread(self._collection.approximate_len, *parts)

    async def put(
        self,
        key: K,
        value: V,
        *,
        ttl: Ttl | None = None,
        expire_at: Instant | None = None,
        await_durable: bool = False,
    ) -> WriteHandle | None:
        """Set `key` to `value`, and change the indexes in the same transaction."""
        return await asyncio.to_thread(
            self._collection.put, key, value, ttl=ttl, expire_at=expire_at, await_durable=await_durable
        )

    async def delete(self, key: K, *, await_durable: bool = False) -> WriteHandle | None:
        """Delete `key`, whether or not it exists, and its entries in the indexes."""
        return await asyncio.to_thread(self._collection.delete, key, await_durable=await_durable)

    async def pop(self, key: K, default: Any = MISSING) -> Any:
        """Delete `key` and return its value; without the key `default`, or a `KeyError`."""
        return await asyncio.to_thread(self._collection.pop, key, default)

    async def setdefault(self, key: K, default: V) -> V:
        """The value of `key`, which is set to `default` if it does not exist."""
        return await asyncio.to_thread(self._collection.setdefault, key, default)

    async def popitem(self, *, last: bool = True) -> tuple[K, V]:
        """Delete the row with the largest key (or the smallest) and return it. Raises `KeyError` if there is none."""
        return await asyncio.to_thread(self._collection.popitem, last=last)

    async def update(self, rows: Any = (), /, **named: V) -> None:
        """Put all rows of a mapping, or of an iterable of pairs, then those named by keywords."""
        await asyncio.to_thread(self._collection.update, rows, **named)

    async def clear(self) -> None:
        """Delete all rows that there are now."""
        await asyncio.to_thread(self._collection.clear)

    async def index(self, name: str, of: Callable[[V], Any], *, unique: bool = False) -> AsyncIndex[K, V]:
        """Declare an index; see `Collection.index`. `of` may be called on other threads."""
        return AsyncIndex(await asyncio.to_thread(self._collection.index, name, of, unique=unique))

    async def drop_index(self, name: str) -> None:
        """Delete an index with all its entries. Doing it twice is fine."""
        await asyncio.to_thread(self._collection.drop_index, name)

    @property
    def indexes(self) -> dict[str, AsyncIndex[K, V]]:
        """The declared indexes by name."""
        return {name: AsyncIndex(index) for name, index in self._collection.indexes.items()}

    async def check_indexes(self) -> list[Problem]:
        """Compare all indexes with the rows; see `Collection.check_indexes`."""
        return await asyncio.to_thread(self._collection.check_indexes)

    def __repr__(self) -> str:
        return f"Async{self._collection!r}"


class AsyncIndex(Generic[K, V]):
    """A secondary index of a collection; see `Index`."""

    def __init__(self, index: Index[K, V]) -> None:
        self._index = index

    @property
    def name(self) -> str:
        """The name of the index."""
        return self._index.name

    @property
    def unique(self) -> bool:
        """Whether a key of the index belongs to one row at most."""
        return self._index.unique

    def within(self, handle: AsyncReads) -> AsyncIndex[K, V]:
        """The same index, read through a transaction, snapshot, reader or database."""
        return AsyncIndex(self._index.within(handle._reads))

    def scan(
        self,
        *parts: Any,
        start: Any = None,
        stop: Any = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[tuple[K, V]]:
        """The rows whose keys in the index begin with `parts`, for `async for`; see `Index.scan`."""
        return _awaited(self._index.scan(*parts, start=start, stop=stop, reverse=reverse, limit=limit))

    def keys(self, *parts: Any, reverse: bool = False, limit: int | None = None) -> AsyncIterator[K]:
        """The keys of these rows."""
        return _awaited(self._index.keys(*parts, reverse=reverse, limit=limit))

    def values(self, *parts: Any, reverse: bool = False, limit: int | None = None) -> AsyncIterator[V]:
        """The values of these rows."""
        return _awaited(self._index.values(*parts, reverse=reverse, limit=limit))

    async def get(self, parts: Any, default: Any = None) -> Any:
        """The value of the first row with this key of the index, or `default`."""
        return await asyncio.to_thread(self._index.get, parts, default)

    async def count(self, *parts: Any) -> int:
        """The number of entries whose keys begin with `parts`."""
        return await asyncio.to_thread(self._index.count, *parts)

    def __repr__(self) -> str:
        return f"Async{self._index!r}"


async def _awaited(blocking: Iterator[T]) -> AsyncIterator[T]:
    end: Any = object()
    while (item := await asyncio.to_thread(next, blocking, end)) is not end:
        yield item
