"""The wheel reads our metadata with checksums, and its own objects are not reported as damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, WalReader
from flagstone.metadata.integrity import seal_metadata
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from kit.databases import QUIET

PATHS = DbPaths("db")

JUMPS = """
import asyncio, os, sys
from slatedb.uniffi import DbBuilder, IsolationLevel, ObjectStoreBuilder, PutOptions, Ttl, WriteOptions

async def put(db, key, seqnum=0):
    await db.put_with_options(key, b"v", PutOptions(ttl=Ttl.DEFAULT()), WriteOptions(seqnum=seqnum))

async def main(folder, session):
    db = await DbBuilder("db", ObjectStoreBuilder.from_url(f"file://{folder}").build()).build()
    await put(db, b"a%d" % session, 100 * (session + 1))
    one, two = await db.begin(IsolationLevel.SNAPSHOT), await db.begin(IsolationLevel.SNAPSHOT)
    await one.put(b"x", b"1")
    await two.put(b"x", b"2")
    await one.commit()
    try:
        await two.commit()
    except Exception:
        pass
    await db.flush()
    await put(db, b"b%d" % session)
    await db.flush()
    os._exit(0)  # a crash: no memtable is flushed

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def crash_with_jumps(folder: Path, session: int) -> None:
    subprocess.run([sys.executable, "-c", JUMPS, str(folder), str(session)], check=True, timeout=60)


@pytest.mark.slow
def test_sequence_numbers_that_the_wheel_skips_are_not_reported_as_lost(tmp_path: Path) -> None:
    for session in range(3):
        crash_with_jumps(tmp_path, session)
    expected = [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2", b"x"]
    url = f"file://{tmp_path}"
    with flagstone.open_reader("db", store=url, mode="latest") as reader:
        assert [key for key, _ in reader.scan()] == expected
    assert Admin("db", store=url).verify().ok
    assert len(list(WalReader("db", store=url).changes())) == 9
    with flagstone.open("db", store=url, settings=QUIET) as db:
        assert [key for key, _ in db.scan()] == expected


def test_the_wheel_reads_and_rewrites_metadata_with_checksums(tmp_path: Path, wheel: Any) -> None:
    with flagstone.open("db", store=f"file://{tmp_path}", settings=QUIET) as db:
        db.put(b"ours", b"1")
    store = LocalStore(tmp_path)
    manifests = ManifestStore(store, PATHS)
    manifests.advance_boundary(1)
    newest = manifests.require_latest()
    assert wheel.apply(str(tmp_path), "db", [("put", b"theirs", b"2"), ("flush", "memtable")]) == {
        b"ours": b"1",
        b"theirs": b"2",
    }
    after = ManifestStore(store, PATHS).require_latest()
    assert after.id > newest.id
    path = max((tmp_path / "db" / "compactions").iterdir())
    path.write_bytes(seal_metadata(path.read_bytes(), path.name))
    assert wheel.compact(str(tmp_path), "db") == {b"ours": b"1", b"theirs": b"2"}
    assert CompactionsStore(store, PATHS).latest() is not None
    with flagstone.open("db", store=f"file://{tmp_path}", settings=QUIET) as db:
        assert list(db.scan()) == [(b"ours", b"1"), (b"theirs", b"2")]
    assert Admin("db", store=f"file://{tmp_path}").verify().ok


LONG_KEYS = """
import asyncio, os, sys
from slatedb.uniffi import DbBuilder, FlushOptions, FlushType, ObjectStoreBuilder

async def main(folder):
    db = await DbBuilder("db", ObjectStoreBuilder.from_url(f"file://{folder}").build()).build()
    await db.put(b"a", b"1")
    await db.put(b"K" * 70_000, b"2")
    await db.put(b"K" * 70_000 + b"z", b"3")
    await db.put(b"z", b"4")
    await db.flush_with_options(FlushOptions(flush_type=FlushType.MEM_TABLE))
    await db.put(b"L" * 200_000, b"5")
    await db.put(b"zz", b"6")
    await db.flush()
    os._exit(0)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
def test_keys_longer_than_our_limit_are_read_from_ssts_and_from_the_wal(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LONG_KEYS, str(tmp_path)], check=True, timeout=60)
    expected = [
        (b"K" * 70_000, b"2"),
        (b"K" * 70_000 + b"z", b"3"),
        (b"L" * 200_000, b"5"),
        (b"a", b"1"),
        (b"z", b"4"),
        (b"zz", b"6"),
    ]
    url = f"file://{tmp_path}"
    with flagstone.open_reader("db", store=url, mode="latest") as reader:
        assert list(reader.scan()) == expected
        assert list(reader.scan(reverse=True)) == expected[::-1]
        assert reader.scan_arrow().read_all().to_pydict()["key"] == [key for key, _ in expected]
        assert [reader.get(key) for key, _ in expected] == [value for _, value in expected]
        assert list(reader.scan(prefix=b"L")) == expected[2:3]
        assert reader.get(b"K" * 70_001) is None
    assert [change.key for change in WalReader("db", store=url).changes()][-2] == b"L" * 200_000
    assert Admin("db", store=url).verify().ok
