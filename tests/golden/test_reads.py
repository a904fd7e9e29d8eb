"""The golden databases through the read path: gets, scans both ways and Arrow show what the official wheel read."""

from __future__ import annotations

import pytest

from flagstone.metadata.manifest import Manifest
from flagstone.read.arrow import scan_arrow
from flagstone.read.drivers import multi_get, visible_row
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.sst.cache import SstCache
from flagstone.sst.store import SstStore
from flagstone.types import MAX_SEQ
from golden.corpus import GoldenDatabase, every_database
from golden.reading import PlainReader
from kit.databases import Append
from kit.ssts import PlainMemtable

NOW_MS = 0


def opened(database: GoldenDatabase, capacity_bytes: int) -> tuple[SstStore, ReadView]:
    """The latest manifest, with the rows of the WAL in a memtable."""
    reader = PlainReader(database)
    manifest: Manifest = reader.manifests.require_latest().value
    ssts = SstStore(reader.store, reader.paths, cache=SstCache(capacity_bytes=capacity_bytes))
    memtable = PlainMemtable(reader._wal_rows(manifest, None))
    return ssts, ViewBuilder(ssts).build(manifest, [memtable])


@pytest.mark.parametrize("capacity_bytes", [0, 1 << 30])
@every_database
def test_gets_and_scans_return_what_the_wheel_read(database: GoldenDatabase, capacity_bytes: int) -> None:
    expected = {bytes.fromhex(key): bytes.fromhex(value) for key, value in database.expected["kv"].items()}
    pairs = sorted(expected.items())
    ssts, view = opened(database, capacity_bytes)
    request = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, include_expired=True, merge_operator=Append())
    backward = ScanRequest(
        max_seq=MAX_SEQ, now_ms=NOW_MS, include_expired=True, merge_operator=Append(), reverse=True
    )
    assert list(Scan(ssts, view, request)) == pairs
    assert list(Scan(ssts, view, backward)) == pairs[::-1]
    table = scan_arrow(ssts, view, request).read_all()
    assert table.column("key").to_pylist() == [key for key, _ in pairs]
    assert table.column("value").to_pylist() == [value for _, value in pairs]
    asked = [*expected, b"a key that was never written", *(key + b"\0" for key in expected)]
    rows = [
        visible_row(found, max_seq=MAX_SEQ, now_ms=NOW_MS, include_expired=True, merge_operator=Append())
        for found in multi_get(ssts, view, asked, MAX_SEQ)
    ]
    assert [row and row.value for row in rows] == [expected.get(key) for key in asked]
