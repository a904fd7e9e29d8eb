"""Former rows: what a key held before a change, and what the database held before it was overwritten.

The state at the start of a micro-batch is found exactly, from two parts: a base checkpoint, which shows everything up
to a position before the micro-batch, and the WAL files since then. Within the micro-batch, each change is the former
row of the next change of its key. Operands of merges are folded. A former row counts as expired if it had expired when
the change was made, so a repeated micro-batch finds the same former rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.config import ReaderSettings
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import visible_value
from flagstone.metadata.annotations import Position
from flagstone.read import drivers
from flagstone.read.drivers import Found
from flagstone.spark.stream.options import StreamOptions
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, VALUE, EntryTuple, KeyRange

_CACHE_BYTES: Final = 64 * 1024 * 1024
_PAIRS: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_KINDS: Final = {"put": VALUE, "delete": TOMBSTONE, "merge": MERGE}


class BaseState(NamedTuple):
    """A checkpoint that shows everything up to the position, and nothing after it."""

    checkpoint: str
    position: Position


class FormerRows:
    """The rows before each change of one partition. Holds the newest row of every key that it was asked about.

    `since` are the rows that were written after the base and before the partition, in commit order.
    """

    def __init__(self, options: StreamOptions, base: BaseState, since: Iterable[pa.RecordBatch]) -> None:
        self._operator: MergeOperator | None = options.read.load_merge_operator()
        address = options.address
        self._reader: DbReader = open_reader(
            address.path,
            **address.arguments,
            checkpoint=base.checkpoint,
            merge_operator=self._operator,
            settings=ReaderSettings(block_cache_bytes=_CACHE_BYTES),
        )
        self._include_system = options.read.include_system
        self._since: dict[bytes, list[EntryTuple]] = defaultdict(list)
        self._held: dict[bytes, list[EntryTuple]] = {}
        try:
            for batch in since:
                for row in entries_of(batch):
                    if row[1] > base.position.after_seq:
                        self._since[row[0]].append(row)
        except BaseException:
            self._reader.close()
            raise

    def close(self) -> None:
        """Close the reader of the base."""
        self._reader.close()

    def before(self, batch: pa.RecordBatch) -> pa.Array:
        """The former value of each change in the batch; null if the key had no row. Batches come in commit order."""
        rows = entries_of(batch)
        self._load({row[0] for row in rows}.difference(self._held))
        return pa.array([self._replace(row) for row in rows], pa.binary())

    def scan(self, keys: KeyRange) -> Iterator[pa.RecordBatch]:
        """The keys and values of the range, expired ones included, each key once and in no certain order."""
        changed = {key for key in self._since if key in keys}
        known = pa.array(sorted(changed), pa.binary())
        rows = self._reader.scan_arrow(
            keys.start,
            keys.stop,
            columns=("key", "value"),
            include_expired=True,
            include_system=self._include_system,
        )
        for batch in rows:
            left = batch.filter(pc.invert(pc.is_in(batch["key"], value_set=known))) if changed else batch
            yield pa.RecordBatch.from_arrays(left.columns, schema=_PAIRS)
        if changed:
            self._load(changed.difference(self._held))
            found = [(key, self._value(self._held[key], None)) for key in sorted(changed)]
            pairs = [{"key": key, "value": value} for key, value in found if value is not None]
            yield pa.RecordBatch.from_pylist(pairs, schema=_PAIRS)

    def _load(self, keys: set[bytes]) -> None:
        wanted = sorted(keys)
        for key, found in zip(wanted, _find(self._reader, wanted), strict=True):
            held = self._held[key] = _oldest_first(found)
            for row in self._since.get(key, ()):
                _apply(held, row)

    def _replace(self, row: EntryTuple) -> bytes | None:
        held = self._held[row[0]]
        before = self._value(held, row[4])
        _apply(held, row)
        if row[2] == MERGE and self._operator is not None and all(each[5] is None for each in held):
            # One row instead of many operands: the next merge then folds two values.
            folded = self._value(held, None)
            held[:] = [(*row[:2], VALUE, folded or b"", row[4], None)]
        return before

    def _value(self, held: list[EntryTuple], now_ms: int | None) -> bytes | None:
        if len(held) == 1 and held[0][2] == VALUE and (held[0][5] is None or now_ms is None):
            return held[0][3]
        row = visible_value(
            reversed(held),
            max_seq=MAX_SEQ,
            now_ms=now_ms or 0,
            include_expired=now_ms is None,
            merge_operator=self._operator,
        )
        return None if row is None else row.value


def entries_of(batch: pa.RecordBatch) -> list[EntryTuple]:
    """The changes of a batch as rows."""
    cells = (batch[name].to_pylist() for name in ("key", "seq", "op", "value", "created_ms", "expires_ms"))
    return [
        (key, seq, _KINDS[op], value or b"", created_ms, expires_ms)
        for key, seq, op, value, created_ms, expires_ms in zip(*cells, strict=True)
    ]


def _apply(held: list[EntryTuple], row: EntryTuple) -> None:
    if row[2] != MERGE:
        held.clear()
    held.append(row)


def _oldest_first(found: Found) -> list[EntryTuple]:
    if found is None:
        return []
    return found[::-1] if isinstance(found, list) else [found]


def _find(reader: DbReader, keys: list[bytes]) -> list[Found]:
    """The newest rows of the keys as they are stored: with their expiry, and operands unfolded."""
    usable = [key for key in keys if key]
    found, _ = reader._read(  # noqa: SLF001 - the public reads hide what has expired, and fold
        lambda view, seq: drivers.multi_get(reader._context.ssts, view, usable, seq),  # noqa: SLF001
        durable_only=False,
        dirty=False,
    )
    return ([None] if len(usable) < len(keys) else []) + list(found)
