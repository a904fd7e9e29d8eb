"""Batches of writes: all rows of a batch get one sequence number, or none of them is written.

For each key the last operation counts. A merge does not replace the operations before it, but adds to them:

    put 1, put 2          -> value 2              merge 1, merge 2      -> operand fold(1, 2)
    put 1, delete         -> tombstone            put 1, merge 2        -> value fold(1, 2)
    merge 1, put 2        -> value 2              delete, merge 2       -> value fold(nothing, 2)

Bad arguments are refused when the operation is added, not when the batch is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import NO_OPERATOR, MergeOperator, check_operand, fold, fold_from_nothing
from flagstone.lsm.system_rows import SYSTEM_PREFIX, SYSTEM_STOP, is_system
from flagstone.types import MAX_KEY_BYTES, MAX_VALUE_BYTES, MERGE, TOMBSTONE, VALUE

Ttl = timedelta | str
"""A time to live: a timedelta, or text such as "30s". `timedelta.max` means forever, whatever the default is."""

Instant = datetime | int
"""A moment: a datetime with a time zone, or milliseconds since the epoch."""

PendingRow = tuple[bytes, int, bytes, int | None]
"""(key, kind, value, expires_ms): a row without sequence number and creation time."""

_MAX_TIME_MS: Final = 2**63 - 1
"""The last time that the format can store."""


class Expiry(NamedTuple):
    """When a row expires, as the caller gave it; `after_ms` counts from the time of the write."""

    after_ms: int | None = None
    at_ms: int | None = None
    never: bool = False

    def resolve(self, created_ms: int, default_ttl_ms: int | None) -> int | None:
        """The time in milliseconds, or None for never. A time after `_MAX_TIME_MS` means never."""
        if self.at_ms is not None:
            return self.at_ms
        ttl_ms = default_ttl_ms if self.after_ms is None else self.after_ms
        if self.never or ttl_ms is None or ttl_ms > _MAX_TIME_MS - created_ms:
            return None
        return created_ms + ttl_ms

    def spelt_out(self, default_ttl_ms: int | None) -> Expiry:
        """The same with the default filled in, so that two of them are equal if they have the same effect."""
        if self.at_ms is not None or self.never or self.after_ms is not None:
            return self
        return _FOREVER if default_ttl_ms is None else Expiry(after_ms=default_ttl_ms)


BY_DEFAULT: Final = Expiry()
_FOREVER: Final = Expiry(never=True)


class Operation(NamedTuple):
    """One operation of a batch; `kind` is VALUE, TOMBSTONE or MERGE."""

    key: bytes
    kind: int
    value: bytes
    expiry: Expiry


class WriteBatch:
    """Puts, deletes and merges to be written at once.

    A batch can be changed and written again; rows that were written do not change. So a failed write can be repeated.
    One thread at a time may use a batch.
    """

    __slots__ = ("_merged", "_operations")

    def __init__(self) -> None:
        # One operation, or a base and the merges on top of it, oldest first.
        self._operations: dict[bytes, Operation | list[Operation]] = {}
        self._merged = False

    def put(
        self, key: bytes, value: bytes, *, ttl: Ttl | None = None, expire_at: Instant | None = None
    ) -> None:
        """Set `key` to `value`. Replaces earlier operations of the batch on this key."""
        key = check_key(key)
        expiry = BY_DEFAULT if ttl is None and expire_at is None else check_expiry(ttl, expire_at)
        self._operations[key] = Operation(key, VALUE, check_value(value), expiry)

    def put_system(self, key: bytes, value: bytes) -> None:
        """Set a system row, which users cannot write. It never expires."""
        self._operations[key] = Operation(key, VALUE, check_value(value), _FOREVER)

    def delete(self, key: bytes) -> None:
        """Delete `key`. Replaces earlier operations of the batch on this key."""
        key = check_any_key(key)
        self._operations[key] = Operation(key, TOMBSTONE, b"", _FOREVER)

    def merge(
        self, key: bytes, operand: bytes, *, ttl: Ttl | None = None, expire_at: Instant | None = None
    ) -> None:
        """Merge `operand` into `key`, on top of earlier operations of the batch on this key.

        Operations that are folded into one row need the same expiry: otherwise writing the batch raises
        `InvalidRequest`.
        """
        key = check_key(key)
        expiry = BY_DEFAULT if ttl is None and expire_at is None else check_expiry(ttl, expire_at)
        operation = Operation(key, MERGE, check_value(operand), expiry)
        self._merged = True
        before = self._operations.get(key)
        if before is None:
            self._operations[key] = operation
        elif isinstance(before, list):
            before.append(operation)
        else:
            self._operations[key] = [before, operation]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.put(key, value)

    def __delitem__(self, key: bytes) -> None:
        self.delete(key)

    def clear(self) -> None:
        """Remove all operations."""
        self._operations.clear()
        self._merged = False

    def __len__(self) -> int:
        """The number of keys that it writes."""
        return len(self._operations)

    def __contains__(self, key: object) -> bool:
        return key in self._operations

    def __iter__(self) -> Iterator[Operation]:
        """The operations that count, key by key in the order of the first operation on each key."""
        for entry in self._operations.values():
            if isinstance(entry, list):
                yield from entry
            else:
                yield entry

    def __repr__(self) -> str:
        return f"WriteBatch(keys={len(self)})"

    def keys(self) -> list[bytes]:
        """The keys it writes, ascending."""
        return sorted(self._operations)

    def operations_of(self, key: bytes) -> list[Operation]:
        """The operations on one key: a base or nothing, then merges, oldest first."""
        entry = self._operations.get(key)
        if entry is None:
            return []
        return list(entry) if isinstance(entry, list) else [entry]

    def settled(
        self, *, default_ttl_ms: int | None = None, operator: MergeOperator | None = None
    ) -> list[Operation]:
        """One operation per key, ascending, with all merges folded. The batch does not change.

        Calls the merge operator, which may be slow: call it without holding a lock.

        Raises:
            InvalidRequest: it merges and there is no operator, the operator refuses an operand, or operations that
                are folded into one row expire at different times.

        """
        if not self._merged:
            return [entry for _, entry in sorted(self._operations.items()) if isinstance(entry, Operation)]
        return [
            self._settle(key, default_ttl_ms=default_ttl_ms, operator=operator)
            for key in sorted(self._operations)
        ]

    def row_of(
        self,
        key: bytes,
        created_ms: int,
        *,
        default_ttl_ms: int | None = None,
        operator: MergeOperator | None = None,
    ) -> PendingRow:
        """The row of one key, as if the batch were written at that time. Raises the errors of `settled`."""
        _, kind, value, expiry = self._settle(key, default_ttl_ms=default_ttl_ms, operator=operator)
        return key, kind, value, expiry.resolve(created_ms, default_ttl_ms)

    def _settle(self, key: bytes, *, default_ttl_ms: int | None, operator: MergeOperator | None) -> Operation:
        entry = self._operations[key]
        if not self._merged and isinstance(entry, Operation):
            return entry
        if operator is None:
            # Also if later puts replaced every merge: the same code would fail with other keys.
            raise InvalidRequest(f"the batch merges, but there is no merge operator: {NO_OPERATOR}")
        return _folded(self.operations_of(key), default_ttl_ms, operator)


def pending_rows(
    operations: Iterable[Operation], created_ms: int, default_ttl_ms: int | None
) -> list[PendingRow]:
    """The rows of settled operations that are written at that time."""
    return [
        (
            key,
            kind,
            value,
            None
            if expiry is BY_DEFAULT and default_ttl_ms is None
            else expiry.resolve(created_ms, default_ttl_ms),
        )
        for key, kind, value, expiry in operations
    ]


def check_key(key: object) -> bytes:
    """The key as bytes. Raises `InvalidRequest` unless it is bytes-like, has 1 to 65,535 bytes, and is not reserved."""
    checked = check_any_key(key)
    if checked < SYSTEM_STOP and is_system(checked):
        raise InvalidRequest(
            f"the key {checked[:60]!r} is reserved: keys that begin with {SYSTEM_PREFIX!r} hold schemas and the "
            "progress of streams, which scans do not show; choose another key"
        )
    return checked


def check_any_key(key: object) -> bytes:
    """The key as bytes, which may be that of a system row. Raises `InvalidRequest` unless it has 1 to 65,535 bytes."""
    checked = key if type(key) is bytes else _as_bytes(key, "key")
    if not 0 < len(checked) <= MAX_KEY_BYTES:
        raise InvalidRequest(f"a key has 1 to {MAX_KEY_BYTES} bytes; this one has {len(checked)}")
    return checked


def check_batch(batch: WriteBatch) -> None:
    """Raise `InvalidRequest` for what is no batch, or an empty one."""
    if not isinstance(batch, WriteBatch):
        raise InvalidRequest(
            f"write takes a WriteBatch, not {type(batch).__name__}; update() puts the rows of a mapping or of pairs"
        )
    if not len(batch):
        raise InvalidRequest("an empty batch writes nothing; add an operation to it")


def check_read_key(key: object) -> bytes:
    """The key as bytes, of any length but 0: SlateDB may have written longer keys. Raises `InvalidRequest`."""
    checked = key if type(key) is bytes else _as_bytes(key, "key")
    if not checked:
        raise InvalidRequest("a key has at least one byte; this one is empty")
    return checked


def check_value(value: object) -> bytes:
    """The value as bytes. Raises `InvalidRequest` unless it is bytes-like and shorter than 4 GiB."""
    checked = value if type(value) is bytes else _as_bytes(value, "value")
    if len(checked) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"a value has at most {MAX_VALUE_BYTES} bytes; this one has {len(checked)}")
    return checked


def check_expiry(ttl: Ttl | None, expire_at: Instant | None) -> Expiry:
    """The expiry from the two options. Raises `InvalidRequest` if one is not a time, or both are given."""
    if ttl is None:
        return BY_DEFAULT if expire_at is None else Expiry(at_ms=_instant_ms(expire_at))
    if expire_at is not None:
        raise InvalidRequest("a row expires after a ttl or at a time: give ttl or expire_at, not both")
    lasting = as_duration(ttl, "ttl")
    if lasting == timedelta.max:
        return _FOREVER
    ttl_ms = lasting // timedelta(milliseconds=1)
    if ttl_ms <= 0:
        raise InvalidRequest(f"a ttl is at least one millisecond; this one is {ttl!r}")
    return Expiry(after_ms=ttl_ms)


def _folded(chain: list[Operation], default_ttl_ms: int | None, operator: MergeOperator) -> Operation:
    """One operation with the effect of the whole `chain`."""
    base = chain[0]
    operands = [operation.value for operation in chain if operation.kind == MERGE]
    for operand in operands:
        check_operand(operator, base.key, operand)
    if len(chain) == 1:
        return base
    # A tombstone never expires, so its expiry is not compared.
    expiry = chain[1].expiry if base.kind == TOMBSTONE else base.expiry
    if any(link.expiry.spelt_out(default_ttl_ms) != expiry.spelt_out(default_ttl_ms) for link in chain[1:]):
        raise InvalidRequest(
            f"the operations on {base.key!r} in this batch would be folded into one row, but expire at different "
            "times; give them the same ttl or the same expire_at, or write them in separate batches"
        )
    if base.kind == MERGE:
        return Operation(base.key, MERGE, fold(operator, base.key, None, operands), expiry)
    if base.kind == TOMBSTONE:
        return Operation(base.key, VALUE, fold_from_nothing(operator, base.key, operands), expiry)
    return Operation(base.key, VALUE, fold(operator, base.key, base.value, operands), expiry)


def _as_bytes(given: object, what: str) -> bytes:
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    advice = _ADVICE.get((what, type(given).__name__), "")
    raise InvalidRequest(f"a {what} is bytes, not {type(given).__name__}{advice}")


_OF_PARTS: Final = "; flagstone.keys.encode(…) makes a key of texts, numbers and tuples that sorts as they do"
_OF_PLAIN: Final = (
    "; encode it first, for instance with json.dumps(…).encode(), or use a typed db.collection(…)"
)
_ADVICE: Final = {
    (
        "key",
        "str",
    ): "; encode it first: b'…' or text.encode(); flagstone.keys.encode(…) is for structured keys",
    ("key", "int"): _OF_PARTS,
    ("key", "tuple"): _OF_PARTS,
    ("key", "list"): _OF_PARTS,
    (
        "key",
        "slice",
    ): "; a slice is read as db[start:stop] or scan(start, stop), and each write names one key",
    ("value", "str"): "; encode it first: b'…' or text.encode()",
    ("value", "NoneType"): "; delete the key, or store b''",
    ("value", "int"): _OF_PLAIN,
    ("value", "float"): _OF_PLAIN,
    ("value", "dict"): _OF_PLAIN,
    ("value", "list"): _OF_PLAIN,
}
"""What to do instead, by what was expected and the type that was given."""


def _instant_ms(moment: Instant) -> int:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidRequest(
                f"expire_at={moment!r} has no time zone; add one, for instance tzinfo=datetime.UTC"
            )
        moment_ms = round(moment.timestamp() * 1000)
    elif isinstance(moment, int) and not isinstance(moment, bool):
        moment_ms = moment
    else:
        raise InvalidRequest(
            f"expire_at is a datetime or milliseconds since the epoch, not {type(moment).__name__}"
        )
    if not 0 <= moment_ms <= _MAX_TIME_MS:
        raise InvalidRequest(f"expire_at={moment!r} is not a time since the epoch")
    return moment_ms
