"""Any WAL surgery: the plan names it, applying it makes the database open, and what could be read is kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.repair.facts import WalFile
from flagstone.repair.wal import batches, misplaced, order_rows
from flagstone.types import VALUE, EntryTuple, WalId
from kit.repair import PATHS, RepairWorld

KEYS = [b"a", b"a\0", b"b", b"\xff", b"key\\1", b"0"]
row_lists = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(1, 12)).map(
        lambda pair: (pair[0], pair[1], VALUE, b"v", 5, None)
    ),
    max_size=6,
)
logs = st.lists(row_lists, max_size=6)


def files_of(log: list[list[EntryTuple]]) -> list[WalFile]:
    return [WalFile(number, f"wal/{number}", 1, tuple(rows)) for number, rows in enumerate(log, 1)]


@given(log=logs, flushed=st.integers(0, 12))
def test_repair_renumbers_rows_in_the_order_of_the_wal(log: list[list[EntryTuple]], flushed: int) -> None:
    numbered = [
        [(row[0], row[1], VALUE, b"%d.%d" % (at, place), 5, None) for place, row in enumerate(rows)]
        for at, rows in enumerate(log)
    ]

    ordered = order_rows(files_of(numbered), after=None, last_l0_seq=flushed)

    kept = list(ordered.rows)
    assert [row[3] for row in kept] == [
        row[3] for rows in numbered for row in rows if row[3] in {found[3] for found in kept}
    ], "rows stay in the order they were written"
    assert all(one[1] <= two[1] for one, two in pairwise(kept))
    assert all(row[1] > flushed for row in kept)
    assert len({(row[0], row[1]) for row in kept}) == len(kept), "no key twice under one number"
    # The rows left out are in SSTs: they are in order and not above the flushed sequence number.
    left_out = [row for rows in numbered for row in rows if row[3] not in {found[3] for found in kept}]
    assert all(row[1] <= flushed for row in left_out)
    newest: dict[bytes, bytes] = {}
    for rows in numbered:
        newest |= {row[0]: row[3] for row in rows if row not in left_out}
    read: dict[bytes, tuple[int, bytes]] = {}
    for row in kept:
        read[row[0]] = max(read.get(row[0], (0, b"")), (row[1], row[3]))
    assert {key: value for key, (_, value) in read.items()} == newest


@given(log=logs)
def test_a_wal_in_order_is_left_as_it_is(log: list[list[EntryTuple]]) -> None:
    seq = 0
    ascending: list[list[EntryTuple]] = []
    for rows in log:
        part: list[EntryTuple] = []
        for batch in batches(sorted(rows)):
            seq += 1
            part += [(row[0], seq, *row[2:]) for row in {row[0]: row for row in batch}.values()]
        ascending.append(part)
    files = files_of(ascending)

    assert misplaced(files) == ()
    ordered = order_rows(files, after=None, last_l0_seq=0)
    assert ordered.renumbered == ()
    assert list(ordered.rows) == [row for rows in ascending for row in rows]


@given(log=logs)
def test_without_the_misplaced_files_the_wal_is_in_order(log: list[list[EntryTuple]]) -> None:
    files = files_of(log)
    bad = misplaced(files)
    assert misplaced([file for file in files if file not in bad]) == ()


@pytest.mark.slow
@settings(max_examples=25)
@given(
    turns=st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), min_size=3, max_size=6),
    flushed=st.integers(0, 2),
    shift=st.integers(1, 4),
    which=st.integers(1, 5),
)
def test_a_repaired_database_with_reused_sequence_numbers_has_every_row(
    turns: list[list[bytes]], flushed: int, shift: int, which: int
) -> None:
    world = RepairWorld()
    world.write_and_crash(
        *(dict.fromkeys(keys, b"%d" % number) for number, keys in enumerate(turns)), flushed=flushed
    )
    ids = world.wal_ids()[flushed:]
    if len(ids) < 2:
        return
    wal_id = ids[1 + which % (len(ids) - 1)]
    rows = [(row[0], max(row[1] - shift, 1), *row[2:]) for row in world.wal_rows(wal_id)]
    world.put_wal(wal_id, rows)
    if world.plan().sound:
        return

    report = world.admin().repair(plan_only=False)

    assert report.applied
    assert report.losses.sequences == ()
    assert world.admin().verify().ok
    assert world.admin().repair().sound
    assert world.rows() == world.model


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_a_wal_file_of_any_bytes_is_read_or_repaired(data: st.DataObject) -> None:
    world = RepairWorld()
    world.write_and_crash(
        *(dict.fromkeys(KEYS[: 1 + number], b"%d" % number) for number in range(4)), flushed=1
    )
    wal_id = data.draw(st.sampled_from(world.wal_ids()))
    path = PATHS.wal(WalId(wal_id))
    stored = bytearray(world.store.get(path).data)
    cut = data.draw(st.integers(1, len(stored)))
    stored = stored[:cut]
    stored[data.draw(st.integers(0, cut - 1))] ^= data.draw(st.integers(0, 255))
    world.store.put(path, bytes(stored))

    if not world.admin().repair().sound:
        report = world.admin().repair(plan_only=False)
        assert report.applied
        assert world.admin().repair().sound
    assert world.admin().verify().ok
    others = {row[0] for other in world.wal_ids() if other != wal_id for row in world.wal_rows(other)}
    rows = world.rows()
    assert rows.keys() <= world.model.keys()
    assert others <= rows.keys()
