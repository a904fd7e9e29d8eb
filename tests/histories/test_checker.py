"""The checker finds every kind of anomaly in a history that has it, and nothing in one that has none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from histories.checker import check
from histories.history import Op, apply


def put(client: int, begin: int, end: int, seq: int, **values: bytes | None) -> Op:
    wrote: Any = [
        (key.encode(), "delete", b"") if value is None else (key.encode(), "put", value)
        for key, value in values.items()
    ]
    return Op("write", client, begin, end, wrote=wrote, seq=seq)


def get(client: int, begin: int, end: int, **values: bytes | None) -> Op:
    return Op("read", client, begin, end, seen=[(key.encode(), value) for key, value in values.items()])


def transaction(
    client: int,
    begin: int,
    end: int,
    *,
    at: int,
    seq: int | None = None,
    seen: dict[str, bytes | None],
    wrote: dict[str, bytes] | None = None,
    isolation: Any = "snapshot",
    **more: Any,
) -> Op:
    return Op(
        "transaction",
        client,
        begin,
        end,
        seen=[(key.encode(), value) for key, value in seen.items()],
        wrote=[(key.encode(), "put", value) for key, value in (wrote or {}).items()],
        seq=seq,
        at=at,
        looked=begin + 1,
        isolation=isolation,
        **more,
    )


def kinds(*ops: Op) -> set[str]:
    return {anomaly.kind for anomaly in check(ops)}


GOOD: dict[str, list[Op]] = {
    "nothing at all": [],
    "reads of an empty database": [get(1, 1, 2, x=None, y=None)],
    "a read during a write sees either": [
        put(1, 1, 10, 1, x=b"1"),
        get(2, 2, 3, x=None),
        get(3, 4, 5, x=b"1"),
        get(2, 6, 7, x=b"1"),
    ],
    "writes that overlap have any order": [
        put(1, 1, 10, 2, x=b"1"),
        put(2, 2, 9, 1, x=b"2"),
        get(1, 11, 12, x=b"1"),
    ],
    "a deleted key is absent again": [
        put(1, 1, 2, 1, x=b"1"),
        put(1, 3, 4, 2, x=None),
        get(1, 5, 6, x=None, y=None),
        put(1, 7, 8, 3, x=b"2"),
        get(1, 9, 10, x=b"2"),
    ],
    "a batch is seen whole or not at all": [
        put(1, 1, 8, 1, x=b"1", y=b"2"),
        get(2, 2, 3, x=None, y=None),
        get(2, 4, 5, x=b"1", y=b"2"),
    ],
    "a snapshot stays where it was": [
        put(1, 1, 2, 1, x=b"1"),
        put(1, 5, 6, 2, x=b"2"),
        Op("snapshot", 2, 3, 20, seen=[(b"x", b"1")], at=1, looked=4),
    ],
    "write skew under snapshot isolation": [
        put(0, 1, 2, 1, x=b"1", y=b"1"),
        transaction(1, 3, 10, at=1, seq=2, seen={"x": b"1", "y": b"1"}, wrote={"x": b"2"}),
        transaction(2, 3, 11, at=1, seq=3, seen={"x": b"1", "y": b"1"}, wrote={"y": b"2"}),
    ],
    "a transaction that was refused": [
        put(0, 1, 2, 1, x=b"1"),
        put(0, 5, 6, 2, x=b"2"),
        transaction(1, 3, 10, at=1, seen={"x": b"1"}, wrote={"x": b"3"}, committed=False),
        get(1, 11, 12, x=b"2"),
    ],
    "a durable read lags behind": [
        put(1, 1, 2, 1, x=b"1"),
        Op("write", 1, 3, 4, wrote=[(b"x", "put", b"2")], seq=2, durable=True),
        put(1, 5, 6, 3, x=b"3"),
        Op("read durable", 1, 7, 8, seen=[(b"x", b"2")], durable=True),
        get(1, 9, 10, x=b"3"),
    ],
    "merges append": [
        put(1, 1, 2, 1, x=b"1"),
        Op("write", 1, 3, 4, wrote=[(b"x", "merge", b"+2")], seq=2),
        get(1, 5, 6, x=b"1+2"),
    ],
    "a transaction sees its own writes over others'": [
        put(1, 1, 2, 1, x=b"1", y=b"1"),
        transaction(
            1,
            3,
            9,
            at=1,
            seq=2,
            seen={},
            wrote={"y": b"5"},
            own=[(b"x", [("merge", b"+2")], b"1+2"), (b"y", [("put", b"5")], b"5")],
        ),
    ],
}

BAD: dict[str, tuple[str, list[Op]]] = {
    "a value that was never written": ("unknown value", [get(1, 1, 2, x=b"?")]),
    "a value of a transaction that was refused": (
        "aborted read",
        [
            transaction(1, 1, 5, at=0, seen={}, wrote={"x": b"3"}, committed=False),
            get(1, 6, 7, x=b"3"),
        ],
    ),
    "a value that its batch overwrote": (
        "intermediate read",
        [
            Op("write", 1, 1, 5, wrote=[(b"x", "put", b"1"), (b"x", "put", b"2")], seq=1),
            get(2, 2, 3, x=b"1"),
        ],
    ),
    "half a batch": (
        "fractured read",
        [put(1, 1, 8, 1, x=b"1", y=b"2"), get(2, 2, 3, x=b"1", y=None)],
    ),
    "two moments in one scan": (
        "fractured read",
        [
            put(1, 1, 2, 1, x=b"1"),
            put(1, 3, 4, 2, x=b"2"),
            put(1, 5, 6, 3, y=b"3"),
            get(2, 1, 9, x=b"1", y=b"3"),
        ],
    ),
    "a plain put that its own thread does not see": (
        "lost own write",
        [put(1, 1, 2, 1, x=b"1"), get(1, 3, 4, x=None)],
    ),
    "a put that another thread does not see after it returned": (
        "stale read",
        [put(1, 1, 2, 1, x=b"1"), get(2, 3, 4, x=None)],
    ),
    "a deletion that is undone": (
        "stale read",
        [put(1, 1, 2, 1, x=b"1"), put(1, 3, 4, 2, x=None), get(2, 5, 6, x=b"1")],
    ),
    "a value from the future": (
        "future read",
        [put(1, 1, 2, 1, x=b"1"), get(2, 3, 4, x=b"2"), put(1, 5, 6, 2, x=b"2")],
    ),
    "one client's reads that go back": (
        "reads go back",
        [put(1, 1, 10, 1, x=b"1"), get(2, 2, 3, x=b"1"), get(2, 4, 5, x=None)],
    ),
    "reads of two clients that go back in real time": (
        "reads go back",
        [put(1, 1, 10, 1, x=b"1"), get(2, 2, 3, x=b"1"), get(3, 4, 5, x=None)],
    ),
    "reads of two keys that disagree about the order of two writes": (
        "reads go back",
        [
            put(1, 1, 20, 1, x=b"1"),
            put(2, 1, 20, 2, y=b"2"),
            get(3, 2, 3, x=None, y=None),
            get(3, 4, 5, y=b"2"),
            get(4, 6, 7, x=None),
        ],
    ),
    "a later write under a smaller number": (
        "writes out of order",
        [put(1, 1, 2, 2, x=b"1"), put(2, 3, 4, 1, y=b"2")],
    ),
    "one number for two writes": (
        "sequence number used twice",
        [put(1, 1, 2, 1, x=b"1"), put(2, 1, 4, 1, y=b"2")],
    ),
    "a snapshot that moves": (
        "wrong snapshot",
        [
            put(1, 1, 2, 1, x=b"1"),
            put(1, 5, 6, 2, x=b"2"),
            Op("snapshot", 2, 3, 20, seen=[(b"x", b"2")], at=1, looked=4),
        ],
    ),
    "a snapshot that moves between two reads": (
        "fractured read",
        [
            put(1, 1, 2, 1, x=b"1", y=b"1"),
            put(1, 5, 6, 2, x=b"2", y=b"2"),
            Op("snapshot", 2, 3, 20, seen=[(b"x", b"1"), (b"y", b"2")], at=1, looked=4),
        ],
    ),
    "a snapshot of the past": (
        "stale read",
        [
            put(1, 1, 2, 1, x=b"1"),
            put(1, 3, 4, 2, x=b"2"),
            Op("snapshot", 2, 5, 9, seen=[(b"x", b"1")], at=1, looked=6),
        ],
    ),
    "two updates of one value": (
        "lost update",
        [
            put(0, 1, 2, 1, x=b"1"),
            transaction(1, 3, 10, at=1, seq=2, seen={"x": b"1"}, wrote={"x": b"2"}),
            transaction(2, 3, 11, at=1, seq=3, seen={"x": b"1"}, wrote={"x": b"3"}),
        ],
    ),
    "a plain put between the read and the write of a transaction": (
        "lost update",
        [
            put(0, 1, 2, 1, x=b"1"),
            put(0, 5, 6, 2, x=b"2"),
            transaction(1, 3, 10, at=1, seq=3, seen={"x": b"1"}, wrote={"x": b"3"}),
        ],
    ),
    "write skew under serializable isolation": (
        "cycle",
        [
            put(0, 1, 2, 1, x=b"1", y=b"1"),
            *(
                transaction(
                    client,
                    3,
                    end,
                    at=1,
                    seq=seq,
                    seen={"x": b"1", "y": b"1"},
                    wrote={key: b"2"},
                    isolation="serializable",
                )
                for client, end, seq, key in ((1, 10, 2, "x"), (2, 11, 3, "y"))
            ),
        ],
    ),
    "a phantom under serializable isolation": (
        "cycle",
        [
            transaction(
                1,
                1,
                10,
                at=0,
                seq=1,
                seen={"a": None, "b": None},
                wrote={"a": b"1"},
                isolation="serializable",
            ),
            transaction(
                2,
                1,
                11,
                at=0,
                seq=2,
                seen={"a": None, "b": None},
                wrote={"b": b"2"},
                isolation="serializable",
            ),
        ],
    ),
    "a transaction that read what was overwritten before it began to commit, and is seen by the writer": (
        "cycle",
        [
            put(0, 1, 2, 1, x=b"1", y=b"1"),
            put(0, 5, 6, 2, x=b"2"),
            get(3, 7, 8, x=b"2", y=b"1"),
            transaction(1, 3, 20, at=1, seq=3, seen={"x": b"1"}, wrote={"y": b"3"}, isolation="serializable"),
        ],
    ),
    "a transaction that does not see what it wrote": (
        "own write not seen",
        [transaction(1, 1, 9, at=0, seq=1, seen={}, wrote={"x": b"5"}, own=[(b"x", [("put", b"5")], None)])],
    ),
    "a durable read without a row that was reported as durable": (
        "lost own write",
        [
            Op("write", 1, 3, 4, wrote=[(b"x", "put", b"2")], seq=2, durable=True),
            Op("read durable", 1, 7, 8, seen=[(b"x", None)], durable=True),
        ],
    ),
    "a durable read without a row that was flushed": (
        "stale read",
        [
            put(1, 1, 2, 1, x=b"1"),
            Op("flush", 2, 3, 4, durable=True),
            Op("read durable", 3, 7, 8, seen=[(b"x", None)], durable=True),
        ],
    ),
    "a merge that was applied twice": (
        "unknown value",
        [
            Op("write", 1, 1, 2, wrote=[(b"x", "merge", b"+1")], seq=1),
            get(1, 3, 4, x=b"+1+1"),
        ],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_correct_history_has_no_anomaly(name: str) -> None:
    assert check(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_the_checker_finds_and_names_each_anomaly(name: str) -> None:
    kind, ops = BAD[name]
    assert kinds(*ops) == {kind}


def correct_history(chance: random.Random, *, calls: int, clients: int) -> list[Op]:
    """What a database under one lock does: each call takes effect at one moment between its begin and its end."""
    moments = sorted(chance.sample(range(10, 100 * calls), calls))
    state: dict[bytes, bytes | None] = {}
    ops: list[Op] = []
    seq = 0
    keys = [b"a", b"b", b"c"]
    for number, moment in enumerate(moments):
        begin, end = moment - chance.randint(1, 300), moment + chance.randint(1, 300)
        times = {"client": number % clients, "begin": begin * 10_000 + number, "end": end * 10_000 + number}
        if chance.random() < 0.5:
            seq += 1
            chosen = chance.sample(keys, chance.randint(1, 3))
            wrote: Any = [(key, chance.choice(["put", "delete", "merge"]), b"%d." % number) for key in chosen]
            for key, kind, value in wrote:
                state[key] = apply(state.get(key), [(kind, value)])
            ops.append(Op("write", **times, wrote=wrote, seq=seq))
        else:
            chosen = chance.sample(keys, chance.randint(1, 3))
            ops.append(Op("read", **times, seen=[(key, state.get(key)) for key in chosen]))
    return ops


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_a_database_under_one_lock_has_no_anomaly(seed: int) -> None:
    assert check(correct_history(random.Random(seed), calls=120, clients=4)) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_checker_finds_a_read_moved_behind_a_later_write_of_its_key(seed: int) -> None:
    chance = random.Random(seed)
    ops = correct_history(chance, calls=120, clients=4)
    latest = max(op.end for op in ops)
    overwritten = [
        op
        for op in ops
        if op.seen
        and any(value is not None for _, value in op.seen)
        and any(
            write.seq
            and write.begin > op.end
            and {key for key, _, _ in write.wrote} & {k for k, v in op.seen if v}
            for write in ops
        )
    ]
    moved = chance.choice(overwritten)
    moved.begin, moved.end = latest + 1, latest + 2
    assert kinds(*ops) & {"stale read", "lost own write", "fractured read"}
