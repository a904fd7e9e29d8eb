from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.types import MERGE, TOMBSTONE, VALUE
from flagstone.write.batch import PendingRow, WriteBatch, check_key

NOW = 1_700_000_000_000


class Brackets:
    """Shows how it was called."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        if operand == b"bad":
            raise ValueError("cannot merge that")
        return operand if existing is None else b"(" + existing + b"+" + operand + b")"


def seal(
    batch: WriteBatch,
    now_ms: int,
    *,
    default_ttl_ms: int | None = None,
    operator: MergeOperator | None = None,
) -> list[PendingRow]:
    """The rows that writing the batch then makes, which must also be what each key gives alone."""
    rows = [
        (key, kind, value, expiry.resolve(now_ms, default_ttl_ms))
        for key, kind, value, expiry in batch.settled(default_ttl_ms=default_ttl_ms, operator=operator)
    ]
    options: dict[str, Any] = {"default_ttl_ms": default_ttl_ms, "operator": operator}
    assert [batch.row_of(row[0], now_ms, **options) for row in rows] == rows
    return rows


def sealed(batch: WriteBatch, **options: Any) -> list[PendingRow]:
    return seal(batch, NOW, operator=Brackets(), **options)


def batch_of(*operations: tuple[Any, ...], key: bytes = b"k") -> WriteBatch:
    batch = WriteBatch()
    for name, *arguments in operations:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        getattr(batch, name)(key, *arguments, **options)
    return batch


def test_rows_come_out_sorted_by_key() -> None:
    batch = WriteBatch()
    batch.put(b"c", b"3")
    batch.delete(b"a")
    batch.put(b"b", b"")

    assert seal(batch, NOW) == [
        (b"a", TOMBSTONE, b"", None),
        (b"b", VALUE, b"", None),
        (b"c", VALUE, b"3", None),
    ]


# What release 0.17.0 stores for the same operations, except that it calls the operator once more per operand.
@pytest.mark.parametrize(
    ("operations", "kind", "value"),
    [
        ([("put", b"1"), ("put", b"2")], VALUE, b"2"),
        ([("put", b"1"), ("delete",)], TOMBSTONE, b""),
        ([("delete",), ("put", b"1")], VALUE, b"1"),
        ([("merge", b"1")], MERGE, b"1"),
        ([("merge", b"1"), ("merge", b"2")], MERGE, b"(1+2)"),
        ([("merge", b"1"), ("merge", b"2"), ("merge", b"3")], MERGE, b"((1+2)+3)"),
        ([("put", b"1"), ("merge", b"2")], VALUE, b"(1+2)"),
        ([("put", b"1"), ("merge", b"2"), ("merge", b"3")], VALUE, b"((1+2)+3)"),
        ([("delete",), ("merge", b"2")], VALUE, b"2"),
        ([("delete",), ("merge", b"2"), ("merge", b"3")], VALUE, b"(2+3)"),
        ([("merge", b"1"), ("put", b"2")], VALUE, b"2"),
        ([("merge", b"1"), ("delete",)], TOMBSTONE, b""),
        ([("put", b"1"), ("merge", b"2"), ("put", b"4"), ("merge", b"5")], VALUE, b"(4+5)"),
    ],
)
def test_the_last_put_or_delete_of_a_key_counts_and_later_merges_are_applied_to_it(
    operations: list[tuple[Any, ...]], kind: int, value: bytes
) -> None:
    batch = batch_of(*operations)

    assert len(batch) == 1
    assert sealed(batch) == [(b"k", kind, value, None)]


def test_an_operand_after_a_delete_becomes_a_finished_value() -> None:
    class Counted(Brackets):
        def finish(self, key: bytes, combined: bytes) -> bytes:
            return b"=" + combined

    batch = batch_of(("delete",), ("merge", b"1"))

    assert seal(batch, NOW, operator=Counted()) == [(b"k", VALUE, b"=1", None)]


@pytest.mark.parametrize("operations", [[("merge", b"1")], [("merge", b"1"), ("put", b"2")]])
def test_a_merge_without_an_operator_raises_invalid_request(operations: list[tuple[Any, ...]]) -> None:
    with pytest.raises(InvalidRequest, match="no merge operator"):
        seal(batch_of(*operations), NOW)


@pytest.mark.parametrize("operations", [[("merge", b"bad")], [("put", b"1"), ("merge", b"bad")]])
def test_an_operand_that_the_operator_refuses_raises_invalid_request(
    operations: list[tuple[Any, ...]],
) -> None:
    with pytest.raises(InvalidRequest, match="cannot merge that"):
        sealed(batch_of(*operations))


HOUR = {"ttl": timedelta(hours=1)}
DAY = {"ttl": timedelta(days=1)}


@pytest.mark.parametrize(
    "operations",
    [
        [("merge", b"1", HOUR), ("merge", b"2", DAY)],
        [("merge", b"1", HOUR), ("merge", b"2")],
        [("put", b"1", HOUR), ("merge", b"2")],
        [("put", b"1"), ("merge", b"2", HOUR)],
        [("delete",), ("merge", b"1", HOUR), ("merge", b"2", DAY)],
        # The same at this moment, but not whenever it is written.
        [("put", b"1", HOUR), ("merge", b"2", {"expire_at": NOW + 3_600_000})],
    ],
)
def test_merged_operands_with_different_expiries_raise_invalid_request(
    operations: list[tuple[Any, ...]],
) -> None:
    with pytest.raises(InvalidRequest, match="expire at different times"):
        sealed(batch_of(*operations))


@pytest.mark.parametrize(
    ("operations", "kind"),
    [
        ([("merge", b"1", HOUR), ("merge", b"2", {"ttl": "3600s"})], MERGE),
        ([("delete",), ("merge", b"1", HOUR)], VALUE),
    ],
)
def test_equal_expiries_given_as_ttl_and_as_time_can_be_merged(
    operations: list[tuple[Any, ...]], kind: int
) -> None:
    ((_, found, _, expires_ms),) = sealed(batch_of(*operations))

    assert (found, expires_ms) == (kind, NOW + 3_600_000)


@pytest.mark.parametrize(
    ("options", "expires_ms"),
    [
        ({}, NOW + 500),
        ({"ttl": "7ms"}, NOW + 7),
        ({"ttl": timedelta(seconds=2)}, NOW + 2000),
        ({"ttl": timedelta.max}, None),
        ({"expire_at": 5}, 5),
        ({"expire_at": datetime(2030, 1, 1, tzinfo=UTC)}, 1_893_456_000_000),
    ],
)
def test_a_row_expires_by_its_own_ttl_or_by_the_default_ttl(
    options: dict[str, Any], expires_ms: int | None
) -> None:
    batch = WriteBatch()
    batch.put(b"k", b"v", **options)

    assert seal(batch, NOW, default_ttl_ms=500) == [(b"k", VALUE, b"v", expires_ms)]
    assert sealed(batch_of(("merge", b"v", options)), default_ttl_ms=500)[0][3] == expires_ms


def test_a_tombstone_never_expires() -> None:
    assert seal(batch_of(("delete",)), NOW, default_ttl_ms=500)[0][3] is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ttl": "0s"}, "at least one millisecond"),
        ({"ttl": -1}, "has no unit"),
        ({"ttl": timedelta(seconds=-1)}, "at least one millisecond"),
        ({"ttl": timedelta(microseconds=1)}, "at least one millisecond"),
        ({"ttl": 2**63}, "has no unit"),
        ({"ttl": 1.5}, "has no unit"),
        ({"ttl": True}, "not a duration"),
        ({"expire_at": -1}, "not a time"),
        ({"expire_at": "tomorrow"}, "not str"),
        ({"expire_at": datetime(2030, 1, 1)}, "time zone"),
        ({"ttl": "1s", "expire_at": 2}, "not both"),
    ],
)
def test_an_invalid_ttl_or_expiry_raises_at_once(options: dict[str, Any], problem: str) -> None:
    batch = WriteBatch()

    with pytest.raises(InvalidRequest, match=problem):
        batch.put(b"k", b"v", **options)
    with pytest.raises(InvalidRequest, match=problem):
        batch.merge(b"k", b"v", **options)
    assert len(batch) == 0


@pytest.mark.parametrize(
    ("key", "problem"),
    [(b"", "has 0"), (bytes(65_536), "has 65536"), ("text", "encode"), (None, "NoneType"), (5, "int")],
)
def test_a_bad_key_is_refused_at_once(key: Any, problem: str) -> None:
    batch = WriteBatch()

    for call in (lambda: batch.put(key, b""), lambda: batch.delete(key), lambda: batch.merge(key, b"")):
        with pytest.raises(InvalidRequest, match=problem):
            call()
    assert len(batch) == 0


def test_a_value_that_is_not_bytes_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="a value is bytes, not str; encode"):
        WriteBatch().put(b"k", "v")  # type: ignore[arg-type]


def test_a_value_that_is_too_long_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagstone.write.batch.MAX_VALUE_BYTES", 3)

    with pytest.raises(InvalidRequest, match="at most 3 bytes; this one has 4"):
        WriteBatch().put(b"k", b"1234")


def test_bytes_like_arguments_are_copied_at_once() -> None:
    key, value = bytearray(b"k"), bytearray(b"v")
    batch = WriteBatch()
    batch.put(memoryview(key), value)  # type: ignore[arg-type]
    key[0] = value[0] = 0

    assert seal(batch, NOW) == [(b"k", VALUE, b"v", None)]


def test_the_longest_key_is_accepted() -> None:
    assert len(check_key(b"\xff" * 65_535)) == 65_535


def test_a_batch_can_be_written_again_and_changed_in_between() -> None:
    batch = batch_of(("put", b"1"), ("merge", b"2"))
    first = sealed(batch)
    batch.merge(b"k", b"3")

    assert first == [(b"k", VALUE, b"(1+2)", None)]
    assert sealed(batch) == sealed(batch) == [(b"k", VALUE, b"((1+2)+3)", None)]


def test_a_batch_tells_what_it_will_do() -> None:
    batch = WriteBatch()
    batch.put(b"b", b"1")
    batch.merge(b"b", b"2")
    batch.delete(b"a")

    assert batch.keys() == [b"a", b"b"]
    assert b"a" in batch
    assert b"x" not in batch
    assert [(operation.key, operation.kind) for operation in batch] == [
        (b"b", VALUE),
        (b"b", MERGE),
        (b"a", TOMBSTONE),
    ]
    assert [operation.value for operation in batch.operations_of(b"b")] == [b"1", b"2"]
    assert batch.operations_of(b"x") == []
    assert repr(batch) == "WriteBatch(keys=2)"


def test_a_cleared_batch_has_no_operation() -> None:
    batch = batch_of(("merge", b"1"))
    batch.clear()
    batch.put(b"k", b"v")

    assert seal(batch, NOW) == [(b"k", VALUE, b"v", None)]


def test_an_empty_batch_has_no_rows() -> None:
    assert seal(WriteBatch(), NOW) == []
