"""Deletes the rows of a small range with tombstones, where that is cheaper than a manifest.

A manifest that cuts a range out makes the writer flush, every view it cuts a view more, and compactions of those views
start over. Up to a hundred rows cost less as tombstones in one batch. How much the range holds comes from the indexes
of its SSTs, so a large range is recognised without reading it.

The rows are read and deleted by one serializable transaction: a put that returned before is deleted with the others, or
the transaction conflicts. A crash leaves all of the tombstones or none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Final

from flagstone.errors import InvalidRequest, TransactionConflict
from flagstone.format.sst import BlockIndex
from flagstone.lsm.system_rows import SYSTEM_PREFIX, visible_ranges
from flagstone.metadata.manifest import NO_SEQ
from flagstone.read.view import ReadView
from flagstone.sst.reader import INDEX
from flagstone.sst.requests import need_index
from flagstone.sst.store import SstGone, SstStore
from flagstone.types import KeyRange
from flagstone.write.durability import WriteHandle

if TYPE_CHECKING:
    from flagstone.db.writer.database import Db

FEW_ROWS: Final = 100
_FEW_SSTS: Final = 16
_FEW_BYTES: Final = 256 * 1024
_ATTEMPTS: Final = 3


class TooMany(Exception):
    """The range has more than a few rows; nothing was done."""


def delete_keys(db: Db, keys: KeyRange) -> WriteHandle:
    """Delete the rows of the range durably, few with tombstones and many with a manifest; the handle has number 0 if
    there was none. Raises `InvalidRequest` if only system rows can be in it.
    """
    if not keys.empty and not visible_ranges(keys):
        raise InvalidRequest(
            "a range delete keeps system rows, and the range has only their keys, which begin with "
            f"{SYSTEM_PREFIX!r}; choose a range of the application's keys"
        )
    engine, handle = db._engine, None  # noqa: SLF001 - a part of `Db`
    if not keys.empty and keys.stop != b"":
        try:
            handle = delete_few(db, keys)
        except TooMany:
            handle = engine.services.range_deletes.delete(keys)
    return WriteHandle(engine.state, NO_SEQ, engine.env.clock.now_ms()) if handle is None else handle


def delete_few(db: Db, keys: KeyRange) -> WriteHandle | None:
    """Delete the rows of the range durably, and return the handle; None if there was none.

    Raises:
        TooMany: they are not few.

    """
    engine = db._engine  # noqa: SLF001 - a part of `Db`
    for _ in range(_ATTEMPTS):
        view = engine.manifest.view
        try:
            if stored_bytes(engine.manifest.views.ssts, view, keys, limit=_FEW_BYTES) > _FEW_BYTES:
                raise TooMany
            return _delete_all(db, keys)
        except SstGone:
            engine.manifest.refresh()
        except TransactionConflict:
            pass  # a put in the range came in between
        except InvalidRequest:
            break  # a row cannot be read, perhaps because its merge operator is missing
    raise TooMany


def _delete_all(db: Db, keys: KeyRange) -> WriteHandle | None:
    engine = db._engine  # noqa: SLF001 - a part of `Db`
    with db.transaction("serializable") as transaction:
        with transaction.scan(keys.start, keys.stop, include_expired=True) as rows:
            found = [key for key, _ in islice(rows, FEW_ROWS + 1)]
        if len(found) > FEW_ROWS:
            raise TooMany  # which rolls back
        for key in found:
            transaction.delete(key)
        handle = transaction.commit(await_durable=True)
    if handle is None:
        # A delete of the last row may not be durable yet.
        engine.state.wait_durable(transaction.seq)
    return handle


def stored_bytes(ssts: SstStore, view: ReadView, keys: KeyRange, *, limit: int) -> int:
    """The bytes of the blocks in SSTs that may have keys of the range; more than `limit` if they exceed it.

    Raises `SstGone` if an SST was deleted.
    """
    total = count = 0
    for layer in view.forest.scan_layers:
        for start, stop, sst in zip(*layer.parts(), strict=True):
            inside = KeyRange(start or None, stop).intersect(keys)
            if inside.empty:
                continue
            count += 1
            if count > _FEW_SSTS:
                return limit + 1
            last = sst.info.last_entry
            if last is not None and inside == KeyRange(sst.info.first_entry, last + b"\0"):
                total += sst.info.estimated_size
            else:
                total += _bytes_inside(ssts.fetch([need_index(sst)])[sst, INDEX], inside)
            if total > limit:
                return total
    return total


def _bytes_inside(index: BlockIndex, keys: KeyRange) -> int:
    first_keys = index.first_keys
    first = 0 if keys.start is None else max(0, bisect_right(first_keys, keys.start) - 1)
    end = len(first_keys) if keys.stop is None else bisect_left(first_keys, keys.stop)
    return index.stops[end - 1] - index.offsets[first] if end > first else 0
