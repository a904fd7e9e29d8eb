"""A scan whose SSTs are deleted continues in a newer view, also between two blocks and between versions of a key."""

from __future__ import annotations

from typing import Any

import pytest

from flagstone.errors import CorruptData
from flagstone.read.arrow import COLUMNS, scan_arrow
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView
from flagstone.sst.store import SstGone
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, Row
from kit.databases import Append
from kit.ssts import NOW_MS, Rig, VanishingSsts, oracle


def versions(key: bytes, kinds: list[int], newest: int) -> list[EntryTuple]:
    """Rows that fill a third of a block each, so that the rows of a key span several blocks."""
    return [
        (key, newest - age, kind, b"" if kind == TOMBSTONE else b"%s%d." % (key, age) * 110, None, None)
        for age, kind in enumerate(kinds)
    ]


ROWS = [
    *versions(b"a", [VALUE], 50),
    *versions(b"b", [VALUE] * 9, 50),
    *versions(b"c", [MERGE] * 8 + [VALUE] * 4, 50),
    *versions(b"d", [TOMBSTONE, *[VALUE] * 6], 50),
    *versions(b"e", [MERGE] * 7, 50),
    *(row for count in range(1, 7) for row in versions(b"f%d" % count, [MERGE] * count, 50)),
    *versions(b"g", [MERGE] * 3 + [TOMBSTONE] + [VALUE] * 6, 50),
    *versions(b"h", [VALUE] * 3, 50),
]


@pytest.mark.slow
@pytest.mark.parametrize("max_seq", [44, 47, 50])
@pytest.mark.parametrize("how", ["rows", "arrow", "reverse"])
def test_a_scan_continues_in_a_newer_view_from_every_position(how: str, max_seq: int) -> None:
    rig = Rig(capacity_bytes=0)
    view = rig.view(rig.tree(runs=[[rig.add(ROWS)]]))
    elsewhere = rig.view(rig.tree(l0=[rig.add(ROWS[10:]), rig.add(ROWS[:10])]))
    rows = oracle(ROWS, max_seq=max_seq)

    def scanned(gone: int) -> tuple[list[Row], int]:
        ssts: Any = VanishingSsts(rig.sst_store, {gone})
        request = ScanRequest(
            max_seq=max_seq,
            now_ms=NOW_MS,
            merge_operator=Append(),
            reverse=how == "reverse",
            read_ahead_bytes=1024,
            renew=lambda _: elsewhere,
        )
        if how == "arrow":
            reader = scan_arrow(ssts, view, request, columns=COLUMNS)
            return [Row(**row) for batch in reader for row in batch.to_pylist()], ssts.fetches
        return list(Scan(ssts, view, request).rows()), ssts.fetches

    found, fetches = scanned(0)
    expected = rows[::-1] if how == "reverse" else rows
    assert found == expected
    assert fetches > 10
    for gone in range(1, fetches + 1):
        assert scanned(gone)[0] == expected, f"after {gone - 1} fetches"


def test_an_sst_that_newer_views_also_lack_raises_corrupt_data() -> None:
    rig = Rig(capacity_bytes=0)
    view = rig.view(rig.tree(l0=[rig.add(ROWS)]))
    asked: list[ReadView] = []

    def renew(lost: ReadView) -> ReadView:
        asked.append(lost)
        return view

    for path in [meta.path for meta in rig.store.list("db/compacted")]:
        rig.store.delete(path)
    scan = Scan(rig.sst_store, view, ScanRequest(max_seq=50, now_ms=NOW_MS, renew=renew))
    with pytest.raises(CorruptData, match="newest manifest refers to it"):
        next(scan)
    assert asked == [view] * 3


def test_a_scan_without_renew_raises_sst_gone() -> None:
    rig = Rig(capacity_bytes=0)
    view = rig.view(rig.tree(l0=[rig.add(ROWS)]))
    for path in [meta.path for meta in rig.store.list("db/compacted")]:
        rig.store.delete(path)
    with pytest.raises(SstGone):
        next(Scan(rig.sst_store, view, ScanRequest(max_seq=50, now_ms=NOW_MS)))
