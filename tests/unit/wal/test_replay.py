from __future__ import annotations

from threading import Event, Lock
from typing import TYPE_CHECKING

import pytest

import flagstone
from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.format.codec import seal
from flagstone.format.sst import encode_footer
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.kernels import index as index_kernel
from flagstone.kernels import memtable as kernel
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.pool import IoPool
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import StoredObject
from flagstone.types import VALUE, EntryTuple, WalId
from flagstone.wal.frontier import find_frontier
from flagstone.wal.replay import WalTruncated, fetch_in_order, plan_window, replay
from golden.corpus import databases
from golden.reading import PlainReader, _visible
from kit.databases import MANUAL, encode_wal
from kit.wal import row

if TYPE_CHECKING:
    from kit.wal import WalFiles

PATHS = DbPaths("db")


@pytest.fixture(params=["one by one", "ahead"])
def maybe_pool(request: pytest.FixtureRequest, pool: IoPool) -> IoPool | None:
    return None if request.param == "one by one" else pool


def test_replay_returns_wal_files_in_order_and_fences_without_rows(
    wal: WalFiles, maybe_pool: IoPool | None
) -> None:
    wal.add(1)
    wal.add(2, row(1), row(2))
    wal.add(3)
    wal.add(4, row(3))

    files = list(replay(wal.store, PATHS, WalId(0), WalId(4), pool=maybe_pool))

    assert [(file.wal_id, file.rows) for file in files] == [
        (1, []),
        (2, [row(1), row(2)]),
        (3, []),
        (4, [row(3)]),
    ]
    assert [file.size > 0 for file in files] == [False, True, False, True]
    assert wal.requests == {"get": 4}


def test_wal_files_outside_of_the_requested_range_are_not_read(wal: WalFiles, pool: IoPool) -> None:
    wal.add_files(1, 9)

    files = list(replay(wal.store, PATHS, WalId(3), WalId(6), pool=pool))

    assert [file.wal_id for file in files] == [4, 5, 6]
    assert wal.requests == {"get": 3}


def test_rows_that_are_already_in_ssts_are_left_out(wal: WalFiles) -> None:
    wal.add(1, row(1), row(2))
    wal.add(2, row(3), row(4, b"a"), row(4, b"b"))
    wal.add(3, row(5))

    files = list(replay(wal.store, PATHS, WalId(0), WalId(3), skip_through_seq=3))

    assert [file.rows for file in files] == [[], [row(4, b"a"), row(4, b"b")], [row(5)]]


def wal_with_a_long_key() -> bytes:
    """A WAL file as only SlateDB writes it: row 7 has a key of 65,536 bytes, row 8 a short one."""

    def entry(key: bytes, seq: int) -> bytes:
        size = b"\x80\x80\x04" if len(key) == 65_536 else bytes([len(key)])
        return b"\0" + size + b"\0" + key + seq.to_bytes(8, "big") + b"\0"

    data = seal(entry(b"k" * 65_536, 7) + entry(b"short", 8) + b"\0\0" + b"\0\1")
    index = seal(index_kernel.encode_index([0], [b""]))
    info = SsTableInfo(
        (7).to_bytes(8, "big"), None, len(data), len(index), len(data), 0, sst_type=SstType.WAL
    )
    return data + index + encode_footer(info, len(data) + len(index))


def test_a_key_that_is_too_long_for_a_memtable_is_left_out_with_the_rows_that_are_in_ssts(
    wal: WalFiles,
) -> None:
    wal.memory.put(PATHS.wal(WalId(1)), wal_with_a_long_key())
    memtable = kernel.Memtable()

    (file,) = replay(wal.store, PATHS, WalId(0), WalId(1), skip_through_seq=7)

    assert file.content.has_long_key
    assert file.insert_into(memtable) == (8, None)
    assert memtable.get(b"short", 8) == (b"short", 8, VALUE, b"", None, None)
    assert len(memtable) == 1


def test_opening_refuses_a_key_that_is_too_long_for_a_memtable() -> None:
    store = MemoryStore()
    flagstone.open("db", store=store, settings=MANUAL).close()
    store.put(PATHS.wal(WalId(2)), wal_with_a_long_key())

    with pytest.raises(InvalidRequest, match="WAL file 2 holds a key of 65536 bytes"):
        flagstone.open("db", store=store, settings=MANUAL)


def test_hundreds_of_wal_files_are_read_in_order_through_a_pool(wal: WalFiles, pool: IoPool) -> None:
    wal.add_files(1, 300)

    files = list(replay(wal.store, PATHS, WalId(0), WalId(300), pool=pool))

    assert [file.rows[0][1] for file in files] == list(range(1, 301))


def test_a_missing_wal_file_raises_wal_truncated(wal: WalFiles, maybe_pool: IoPool | None) -> None:
    wal.add_files(1, 3)
    wal.remove(2)
    files = replay(wal.store, PATHS, WalId(0), WalId(3), pool=maybe_pool)

    assert next(files).wal_id == 1
    with pytest.raises(WalTruncated, match=r"00002\.sst has vanished"):
        next(files)


@pytest.mark.parametrize("seq", [4, 5])
def test_a_wal_file_that_begins_before_the_end_of_its_predecessor_raises_corrupt_data(
    wal: WalFiles, seq: int
) -> None:
    wal.add(1, row(3), row(5))
    wal.add(2)
    wal.add(3, row(seq))

    with pytest.raises(CorruptData, match=r"00003\.sst: out-of-order .* 5 in file 1"):
        list(replay(wal.store, PATHS, WalId(0), WalId(3)))


def test_the_order_of_left_out_rows_is_checked(wal: WalFiles) -> None:
    wal.add(1, row(9))
    wal.add(2, row(8))

    with pytest.raises(CorruptData, match="out-of-order"):
        list(replay(wal.store, PATHS, WalId(0), WalId(2), skip_through_seq=50))


@pytest.mark.parametrize("byte", [0, 30, -1])
def test_a_damaged_wal_file_raises_corrupt_data_with_object_and_offset(wal: WalFiles, byte: int) -> None:
    stored = bytearray(encode_wal([row(1)]))
    stored[byte] ^= 0xFF
    wal.memory.put(PATHS.wal(WalId(1)), bytes(stored))

    with pytest.raises(CorruptData) as caught:
        list(replay(wal.store, PATHS, WalId(0), WalId(1)))
    assert caught.value.object == PATHS.wal(WalId(1))
    assert caught.value.offset is not None


def test_an_outage_during_a_replay_raises_unavailable(pool: IoPool) -> None:
    class Down(MemoryStore):
        def get(self, path: str) -> StoredObject:
            raise Unavailable("down")

    with pytest.raises(Unavailable, match="down"):
        list(replay(Down(), PATHS, WalId(0), WalId(9), pool=pool))


class Gauge(MemoryStore):
    """Counts the bytes that were returned and not used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.gauge_lock = Lock()
        self.held = self.most = 0

    @property
    def url(self) -> str:
        return "far://away"  # a local store is not read ahead

    def get(self, path: str) -> StoredObject:
        found = super().get(path)
        with self.gauge_lock:
            self.held += len(found.data)
            self.most = max(self.most, self.held)
        return found


def test_read_ahead_stays_within_its_budget(pool: IoPool) -> None:
    store = Gauge()
    for wal_id in range(1, 60):
        store.put(PATHS.wal(WalId(wal_id)), bytes(1000))
    wal_ids = [WalId(wal_id) for wal_id in range(1, 60)]

    for fetched in fetch_in_order(store, PATHS, wal_ids, pool=pool, max_bytes_in_flight=4500):
        with store.gauge_lock:
            store.held -= len(fetched.stored or b"")

    assert 2000 <= store.most <= 5000


def test_the_read_ahead_window_grows_and_is_never_empty() -> None:
    def window(fetched: int, largest: int) -> int:
        return plan_window(fetched=fetched, largest_bytes=largest, parallelism=8, max_bytes=100)

    assert [window(fetched, 1) for fetched in range(6)] == [2, 4, 6, 8, 8, 8]
    assert [window(9, largest) for largest in (0, 10, 25, 50, 99, 100, 1000)] == [8, 8, 4, 2, 1, 1, 1]


@pytest.mark.parametrize(("size", "most"), [(1_000, 8), (100_000, 2), (300_000, 1)])
def test_a_store_on_this_machine_is_read_a_few_small_files_ahead(
    wal: WalFiles, pool: IoPool, size: int, most: int
) -> None:
    for wal_id in range(1, 60):
        wal.memory.put(PATHS.wal(WalId(wal_id)), bytes(size))

    ahead = [
        (fetched.wal_id, wal.requests["get"] - fetched.wal_id + 1)
        for fetched in fetch_in_order(
            wal.store, PATHS, map(WalId, range(1, 60)), pool=pool, clock=VirtualClock()
        )
    ]

    assert [wal_id for wal_id, _ in ahead] == list(range(1, 60))
    assert {count for _, count in ahead[:16]} == {1}
    assert max(count for _, count in ahead) == most


def test_closing_a_replay_cancels_the_reads_that_have_not_started() -> None:
    class Slow(MemoryStore):
        """From the seventh file on it answers only when `answer` is set."""

        answer = Event()
        asked = 0

        def get(self, path: str) -> StoredObject:
            self.asked += 1
            if self.asked > 6:
                self.answer.wait(5)
            return super().get(path)

    store = Slow()
    for wal_id in range(1, 50):
        store.put(PATHS.wal(WalId(wal_id)), b"")
    one_thread = IoPool(max_workers=1, name="single")
    files = fetch_in_order(store, PATHS, map(WalId, range(1, 50)), pool=one_thread, parallelism=40)
    assert [next(files).wal_id for _ in range(6)] == [1, 2, 3, 4, 5, 6]

    files.close()  # type: ignore[attr-defined]
    store.answer.set()
    one_thread.submit(int).result(5)

    assert store.asked <= 7
    one_thread.close()


@pytest.mark.parametrize("name", ["crash", "fencing", "wal_store", "gc", "codec_zstd", "merge", "ttl"])
def test_replaying_a_wal_of_the_official_writer_gives_its_rows(name: str, pool: IoPool) -> None:
    database = next(database for database in databases() if database.name == name)
    reader = PlainReader(database)
    manifest = reader.manifests.require_latest().value
    store, paths = LocalStore(database.wal_store or database.store), DbPaths(database.path)
    last = find_frontier(store, paths, manifest, pool=pool)

    rows: dict[bytes, dict[int, EntryTuple]] = {}
    for sst_row in reader._table_rows(manifest):
        rows.setdefault(sst_row[0], {})[sst_row[1]] = sst_row
    for file in replay(
        store, paths, manifest.replay_after_wal_id, last, skip_through_seq=manifest.last_l0_seq, pool=pool
    ):
        for entry in file.rows:
            assert entry[1] > manifest.last_l0_seq
            rows.setdefault(entry[0], {})[entry[1]] = entry

    contents = {key: value for key in rows if (value := _visible(rows[key])) is not None}
    assert {key.hex(): value.hex() for key, value in contents.items()} == database.expected["kv"]
