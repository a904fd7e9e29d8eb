"""The writing manners of a mapping, for databases (`StoredMapping`) and for transactions (`PendingMapping`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from flagstone.db.mapping import Pairs, pairs_of, take_item, take_value, value_or_put
from flagstone.write.batch import WriteBatch

if TYPE_CHECKING:
    from flagstone.db.writer.transaction import Transaction
    from flagstone.read.scan import Scan
    from flagstone.write.durability import WriteHandle

_T = TypeVar("_T")

BATCH_ROWS: Final = 4096
BATCH_BYTES: Final = 1024 * 1024
"""`update` and `clear` write batches of about this many rows or bytes."""

_ATTEMPTS: Final = 1000
"""`popitem` of many threads conflicts each time: all but one of them try again."""

MISSING: Final[Any] = object()
"""Stands for a default that was not given."""


class StoredMapping(MutableMapping[bytes, bytes]):
    """How a database changes as a mapping. Each call is one transaction, except `update` and `clear`."""

    __slots__ = ()

    if TYPE_CHECKING:

        def run(self, fn: Callable[[Transaction], _T], *, retries: int = ...) -> _T: ...
        def write(self, batch: WriteBatch) -> WriteHandle: ...
        def put(self, key: bytes, value: bytes) -> WriteHandle: ...
        def delete(self, key: bytes) -> WriteHandle: ...
        def scan(self) -> Scan: ...

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.put(key, value)

    def __delitem__(self, key: bytes) -> None:
        self.delete(key)

    @overload
    def pop(self, key: bytes) -> bytes: ...
    @overload
    def pop(self, key: bytes, default: bytes) -> bytes: ...
    @overload
    def pop(self, key: bytes, default: _T) -> bytes | _T: ...
    def pop(self, key: bytes, default: Any = MISSING) -> Any:
        """Delete `key` and return its value, in one transaction; without the key `default`, or a `KeyError`."""
        value = self.run(lambda tx: take_value(tx, key), retries=_ATTEMPTS)
        return found_or(value, key, default)

    def setdefault(self, key: bytes, default: bytes) -> bytes:
        """The value of `key`, which is set to `default` if it does not exist; in one transaction."""
        return self.run(lambda tx: value_or_put(tx, key, default), retries=_ATTEMPTS)

    def popitem(self, *, last: bool = True) -> tuple[bytes, bytes]:
        """Delete the row with the largest key (or the smallest) and return it, in one transaction.

        Raises `KeyError` if there is no row. Taking the smallest again and again slows down: each time it has to pass
        the tombstones of the rows taken before, until compaction removes them.
        """
        return self.run(lambda tx: take_item(tx, last=last), retries=_ATTEMPTS)

    def update(self, rows: Pairs = (), /) -> None:  # type: ignore[override] # keys are bytes: no keywords
        """Put all rows of a mapping, or of an iterable of pairs.

        They are written in batches of about 4096 rows or one MiB. An error, or a crash, leaves a number of whole
        batches, in the order of the rows. For all or nothing use a batch or a transaction.
        """
        for batch in batches_of(rows):
            self.write(batch)

    def clear(self) -> None:
        """Delete all rows that there are now, in batches of about 4096 rows.

        This is not atomic: an error, or a crash, leaves the rows with the larger keys. Rows that are written meanwhile
        may stay. System rows, which hold schemas and the progress of streams, are no rows of the mapping and stay.
        """
        batch = WriteBatch()
        for key, _ in self.scan():
            batch.delete(key)
            if len(batch) == BATCH_ROWS:
                self.write(batch)
                batch.clear()
        if len(batch):
            self.write(batch)


class PendingMapping(MutableMapping[bytes, bytes]):
    """How a transaction changes as a mapping; everything is written when it commits."""

    __slots__ = ()

    if TYPE_CHECKING:

        def get(self, key: bytes) -> bytes | None: ...  # type: ignore[override]
        def put(self, key: bytes, value: bytes) -> None: ...
        def delete(self, key: bytes) -> None: ...
        def scan(self, *, reverse: bool = ..., limit: int | None = ...) -> Scan: ...

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.put(key, value)

    def __delitem__(self, key: bytes) -> None:
        self.delete(key)

    @overload
    def pop(self, key: bytes) -> bytes: ...
    @overload
    def pop(self, key: bytes, default: bytes) -> bytes: ...
    @overload
    def pop(self, key: bytes, default: _T) -> bytes | _T: ...
    def pop(self, key: bytes, default: Any = MISSING) -> Any:
        """Delete `key` and return its value; without the key `default`, or a `KeyError`."""
        return found_or(take_value(self, key), key, default)

    def setdefault(self, key: bytes, default: bytes) -> bytes:
        """The value of `key`, which is set to `default` if it does not exist."""
        return value_or_put(self, key, default)

    def popitem(self, *, last: bool = True) -> tuple[bytes, bytes]:
        """Delete the row with the largest key (or the smallest) and return it. Raises `KeyError` if there is none."""
        return take_item(self, last=last)

    def update(self, rows: Pairs = (), /) -> None:  # type: ignore[override] # keys are bytes: no keywords
        """Put all rows of a mapping, or of an iterable of pairs."""
        for key, value in pairs_of(rows):
            self.put(key, value)

    def clear(self) -> None:
        """Delete all rows that the transaction sees. It holds their keys in memory until it commits."""
        for key, _ in self.scan():
            self.delete(key)


def found_or(value: bytes | None, key: bytes, default: Any) -> Any:
    """What `pop` returns: the value, or the default. Raises `KeyError` if there is neither."""
    if value is not None:
        return value
    if default is MISSING:
        raise KeyError(key)
    return default


def batches_of(rows: Pairs) -> Iterator[WriteBatch]:
    """Batches that put the rows in their order. A batch may be changed after it was written."""
    batch, size = WriteBatch(), 0
    for key, value in pairs_of(rows):
        batch.put(key, value)
        size += len(key) + len(value)
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = WriteBatch(), 0
    if len(batch):
        yield batch
