"""The official wheel and Flagstone use one database in turn, and fence each other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, Closed, Settings
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.operators import Concatenate

pytestmark = pytest.mark.slow

FAR_FUTURE_MS = 10_000_000
TURNS = 20


class Workload:
    """Random operations and the rows that either engine must end with."""

    def __init__(self, seed: int, *, segments: bool) -> None:
        self.random = random.Random(seed)
        self.prefixes = [b"aaa", b"bbb", b"ccc"] if segments else [b"key"]
        self.expected: dict[bytes, bytes] = {}
        self.counter = 0

    def operations(self, count: int) -> list[tuple[Any, ...]]:
        return [self.operation() for _ in range(count)]

    def key(self) -> bytes:
        return self.random.choice(self.prefixes) + b"/%03d" % self.random.randrange(150)

    def value(self) -> bytes:
        self.counter += 1
        return b"value-%d-" % self.counter + bytes(self.random.randrange(0, 300))

    def operation(self) -> tuple[Any, ...]:
        key, value = self.key(), self.value()
        match self.random.choices(
            ["put", "ttl", "delete", "merge", "batch", "wal", "memtable"], [8, 2, 3, 3, 3, 1, 1]
        )[0]:
            case "put":
                self.expected[key] = value
                return ("put", key, value)
            case "ttl":
                self.expected[key] = value
                return ("put", key, value, FAR_FUTURE_MS)
            case "delete":
                self.expected.pop(key, None)
                return ("delete", key)
            case "merge":
                self.expected[key] = self.expected.get(key, b"") + b"+m"
                return ("merge", key, b"+m")
            case "batch":
                inside: list[tuple[Any, ...]] = []
                for _ in range(self.random.randrange(1, 6)):
                    key = self.key()
                    if self.random.random() < 0.3:
                        self.expected.pop(key, None)
                        inside.append(("delete", key))
                    else:
                        value = self.value()
                        self.expected[key] = value
                        inside.append(("put", key, value))
                return ("batch", inside)
            case kind:
                return ("flush", kind)


def perform(db: flagstone.Db, operation: tuple[Any, ...]) -> None:
    match operation:
        case ("put", key, value):
            db.put(key, value)
        case ("put", key, value, ttl_ms):
            db.put(key, value, ttl=f"{ttl_ms}ms")
        case ("delete", key):
            db.delete(key)
        case ("merge", key, operand):
            db.merge(key, operand)
        case ("batch", inside):
            with db.batch() as batch:
                for verb, *arguments in inside:
                    getattr(batch, verb)(*arguments)
        case ("flush", kind):
            db.flush(kind)


def ours(folder: Path, *, codec: str | None = None, segments: bool = False) -> flagstone.Db:
    return flagstone.open(
        "db",
        store=str(folder),
        store_options={"fsync": False},
        settings=Settings(
            compression_codec=codec, min_filter_keys=10, l0_max_ssts=100, l0_max_ssts_per_key=100
        ),
        merge_operator=Concatenate(),
        segment_extractor=FixedPrefix("first3", 3) if segments else None,
    )


@pytest.mark.parametrize(
    ("codec", "segments"),
    [(None, False), ("Snappy", False), ("Zlib", False), ("Lz4", False), ("Zstd", False), (None, True)],
)
def test_wheel_and_flagstone_take_the_database_from_each_other_twenty_times_without_losing_a_row(
    codec: str | None, segments: bool, tmp_path: Path, wheel: Any
) -> None:
    work = Workload(7, segments=segments)
    for turn in range(TURNS):
        operations = work.operations(25)
        if turn % 2:
            seen = wheel.apply(str(tmp_path), "db", operations, segments=segments, compression_codec=codec)
        else:
            with ours(tmp_path, codec=codec, segments=segments) as db:
                for operation in operations:
                    perform(db, operation)
                seen = dict(db.scan())
                assert dict(db.scan(reverse=True)) == seen
                keys = [work.key() for _ in range(20)]
                assert db.multi_get(keys) == [work.expected.get(key) for key in keys]
                assert [db.get(key) for key in keys] == [work.expected.get(key) for key in keys]
        assert seen == work.expected, f"turn {turn}"
    report = Admin("db", store=str(tmp_path)).verify()
    assert report.ok, report.findings


def test_a_fenced_wheel_fails_at_its_next_durable_write(tmp_path: Path, wheel: Any) -> None:
    wheel.hold(str(tmp_path), "db")
    assert wheel.held_put("db", b"theirs", b"1") == "durable"

    with ours(tmp_path) as db:
        assert db.get(b"theirs") == b"1"
        refusal = wheel.held_put("db", b"late", b"2")
        assert "detected newer DB client" in refusal
        db.put(b"ours", b"3", await_durable=True)
        wheel.release("db")
        assert dict(db.scan()) == {b"theirs": b"1", b"ours": b"3"}


def test_a_fenced_flagstone_writer_fails_at_its_next_durable_write(tmp_path: Path, wheel: Any) -> None:
    db = ours(tmp_path)
    db.put(b"ours", b"1", await_durable=True)
    wheel.hold(str(tmp_path), "db")

    with pytest.raises(Closed) as caught:
        db.put(b"late", b"2", await_durable=True)
    assert caught.value.reason == "fenced"
    with pytest.raises(Closed):
        db.get(b"ours")
    assert wheel.held_put("db", b"theirs", b"3") == "durable"
    wheel.release("db")
    db.close()
    assert wheel.scan(str(tmp_path), "db") == {b"ours": b"1", b"theirs": b"3"}


def test_our_checkpoint_is_readable_by_the_wheel(tmp_path: Path, wheel: Any) -> None:
    with ours(tmp_path) as db:
        db.put(b"a", b"1")
        checkpoint = db.checkpoint(name="before")
        db.put(b"a", b"2")
    assert wheel.scan(str(tmp_path), "db", checkpoint=str(checkpoint.id)) == {b"a": b"1"}
    assert wheel.scan(str(tmp_path), "db") == {b"a": b"2"}
