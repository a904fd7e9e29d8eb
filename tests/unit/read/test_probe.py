"""Point reads: which requests they make, which row they return, and what missing or damaged objects raise."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from flagstone.errors import CorruptData, Unavailable
from flagstone.format.codec import Codec, seal
from flagstone.format.sst import encode_footer
from flagstone.format.sst_info import SsTableInfo
from flagstone.kernels import index as index_kernel
from flagstone.lsm.tree import SstView
from flagstone.metadata.manifest import ExternalDb, Segment, SsTable
from flagstone.read.drivers import Need, get, multi_get, probe
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.runtime.ids import Ids
from flagstone.sst.store import SstGone
from flagstone.store.paths import DbPaths
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, EntryTuple, KeyRange, Ulid
from kit.databases import Append
from kit.ssts import PlainMemtable, Rig, RoundCounter, put


def requests(rig: Rig) -> int:
    return sum(rig.store.totals()["requests"].values())


def test_a_cold_get_costs_one_request_for_the_index_and_one_for_the_block() -> None:
    rig = Rig()
    view = rig.view(rig.tree(runs=[[rig.add([put(number) for number in range(500)])]]))
    rig.store.reset()
    assert get(rig.sst_store, view, b"%08d" % 321, MAX_SEQ) == put(321)
    assert requests(rig) == 2
    assert get(rig.sst_store, view, b"%08d" % 321, MAX_SEQ) == put(321)
    assert get(rig.sst_store, view, b"%08d" % 322, MAX_SEQ) == put(322)
    assert requests(rig) == 2


@pytest.mark.parametrize("key", [0, 321, 399])
def test_a_cold_get_takes_two_rounds_however_many_layers_there_are(key: int) -> None:
    rig = Rig()
    everything = [put(number) for number in range(400)]
    l0 = [rig.add([put(0, age), put(399, age), put(1000 + age)]) for age in range(2, 8)]
    elsewhere = rig.add([put(number) for number in range(2000, 2100)])
    run = [rig.add(everything[:200]), rig.add(everything[200:])]
    view = rig.view(rig.tree(l0=[elsewhere, *l0[::-1]], runs=[run]))
    rig.store.reset()
    counted: Any = RoundCounter(rig.sst_store)
    found = get(counted, view, b"%08d" % key, MAX_SEQ)
    assert found == (put(key) if key == 321 else put(key, 7))
    assert counted.rounds == 2
    assert requests(rig) == 7 + 1, "index and filters of six SSTs in L0 and one of the run, and one block"
    if key != 0:  # then also the index of this key is in memory
        assert get(counted, view, b"%08d" % 300, MAX_SEQ) == put(300)
        assert counted.rounds == 3


def test_a_cold_multi_get_takes_one_round_for_all_indexes_and_one_for_all_blocks() -> None:
    rig = Rig(threads=4)
    rows = [put(number, value=b"v" * 300) for number in range(3000)]
    view = rig.view(
        rig.tree(
            l0=[rig.add([put(number, 2 + age) for number in range(age, 3000, 100)]) for age in range(3)][
                ::-1
            ],
            runs=[[rig.add(rows[at : at + 500]) for at in range(0, 3000, 500)]],
        )
    )
    rig.store.reset()
    counted: Any = RoundCounter(rig.sst_store)
    asked = list(range(0, 3000, 30))
    found = multi_get(counted, view, [b"%08d" % number for number in asked], MAX_SEQ)
    assert [row[0] for row in found if isinstance(row, tuple)] == [b"%08d" % number for number in asked]
    assert counted.rounds == 2
    assert rig.store.totals()["requests"]["get_range"] < 9 + 100


@pytest.mark.slow
def test_a_get_of_the_first_key_of_a_block_needs_no_other_request() -> None:
    rows = [put(number) for number in range(300)]
    for row in rows:
        cold = Rig()
        view = cold.view(cold.tree(runs=[[cold.add(rows)]]))
        cold.store.reset()
        assert get(cold.sst_store, view, row[0], MAX_SEQ) == row
        assert requests(cold) == 2


def test_a_get_from_a_small_sst_costs_one_request() -> None:
    rig = Rig(small_sst_bytes=1 << 20)
    view = rig.view(rig.tree(l0=[rig.add([put(number) for number in range(50)])]))
    rig.store.reset()
    assert get(rig.sst_store, view, b"%08d" % 7, MAX_SEQ) == put(7)
    assert requests(rig) == 1


def test_a_key_that_the_filter_excludes_fetches_no_block() -> None:
    rig = Rig()
    view = rig.view(rig.tree(l0=[rig.add([put(number) for number in range(0, 1000, 2)])]))
    absent = [b"%08d" % number for number in range(1, 1000, 2)]
    rig.store.reset()
    assert multi_get(rig.sst_store, view, absent, MAX_SEQ) == [None] * 500
    assert requests(rig) < 10
    rig.sst_store.report()
    counts = rig.metrics.as_dict()
    assert counts["slatedb.db.sst_filter_negative_count{kind=point}"] > 480  # type: ignore[operator]
    assert counts["slatedb.db_cache.access_count{entry_kind=index,result=miss}"] == 1


def test_a_cache_hit_and_a_cache_miss_are_counted_once_each() -> None:
    rig = Rig()
    view = rig.view(rig.tree(l0=[rig.add([put(number) for number in range(100)])]))
    for _ in range(3):
        get(rig.sst_store, view, b"%08d" % 50, MAX_SEQ)
    rig.sst_store.report()
    counts = rig.metrics.as_dict()
    assert counts["slatedb.db_cache.access_count{entry_kind=data_block,result=miss}"] == 1
    assert counts["slatedb.db_cache.access_count{entry_kind=data_block,result=hit}"] == 2


def test_a_multi_get_reads_each_block_once() -> None:
    rig = Rig()
    rows = [put(number) for number in range(2000)]
    view = rig.view(rig.tree(runs=[[rig.add(rows[:1000]), rig.add(rows[1000:])]]))
    rig.store.reset()
    assert multi_get(rig.sst_store, view, [row[0] for row in rows], MAX_SEQ) == rows
    # One for each SST's index, then its blocks: the first key of a block is searched in two blocks.
    assert requests(rig) <= 6


def test_a_probe_returns_what_it_needs_and_accepts_it_as_pinned_without_a_cache() -> None:
    rig = Rig(capacity_bytes=0)
    view = rig.view(rig.tree(l0=[rig.add([put(number) for number in range(100)])]))
    first = probe(view, b"%08d" % 50, MAX_SEQ)
    assert isinstance(first, Need)
    assert first.numbers == []
    pinned = rig.sst_store.fetch([first])
    second = probe(view, b"%08d" % 50, MAX_SEQ, pinned)
    assert isinstance(second, Need)
    assert len(second.numbers) == 1
    pinned.update(rig.sst_store.fetch([second]))
    assert probe(view, b"%08d" % 50, MAX_SEQ, pinned) == put(50)


def test_a_get_returns_the_newest_row_even_if_it_is_a_tombstone() -> None:
    rig = Rig()
    run = rig.add([put(b"a", 1), put(b"b", 2), put(b"c", 3)])
    l0 = rig.add([(b"b", 5, TOMBSTONE, b"", None, None)])
    memtable = PlainMemtable([put(b"c", 9)])
    view = rig.view(rig.tree(l0=[l0], runs=[[run]]), [memtable])
    found = multi_get(rig.sst_store, view, [b"a", b"b", b"c", b"d"], MAX_SEQ)
    assert found == [put(b"a", 1), (b"b", 5, TOMBSTONE, b"", None, None), put(b"c", 9), None]
    assert multi_get(rig.sst_store, view, [b"b", b"c"], 4) == [put(b"b", 2), put(b"c", 3)]


def test_merge_operands_are_collected_across_sources_down_to_the_first_value() -> None:
    rig = Rig()
    operand = [(b"k", seq, MERGE, b"%d" % seq, None, None) for seq in range(20)]
    base = rig.add([put(b"k", 1)])
    older = rig.add([operand[4], operand[3], operand[2]])
    newer = rig.add([operand[6], operand[5]])
    view = rig.view(rig.tree(l0=[newer, older], runs=[[base]]), [PlainMemtable([operand[8], operand[7]])])
    assert get(rig.sst_store, view, b"k", MAX_SEQ) == [*operand[8:1:-1], put(b"k", 1)]
    assert get(rig.sst_store, view, b"k", 3) == [operand[3], operand[2], put(b"k", 1)]


@pytest.mark.parametrize("size", [10, 3000])
def test_versions_of_a_key_in_several_blocks_and_ssts_are_all_found(size: int) -> None:
    rig = Rig()
    versions = [put(b"hot", seq, b"%d" % seq * size) for seq in range(40, 0, -1)]
    rows = [put(b"a", 1), *versions, put(b"z", 1)]
    run = [rig.add(rows[start : start + 7]) for start in range(0, len(rows), 7)]
    view = rig.view(rig.tree(runs=[run]))
    for row in rows:
        assert get(rig.sst_store, view, row[0], row[1]) == row
    assert get(rig.sst_store, view, b"hot", 0) is None


def test_keys_outside_the_visible_range_of_an_sst_are_not_found() -> None:
    rig = Rig()
    rows = [put(number) for number in range(100)]
    whole = rig.add(rows, visible=KeyRange(b"%08d" % 20, b"%08d" % 40))
    again = replace(rig.add(rows, visible=KeyRange(b"%08d" % 60, b"%08d" % 80)), sst_id=whole.sst_id)
    view = rig.view(rig.tree(runs=[[whole, again]]))
    found = multi_get(rig.sst_store, view, [row[0] for row in rows], MAX_SEQ)
    assert [number for number, row in enumerate(found) if row] == [*range(20, 40), *range(60, 80)]


def test_an_sst_with_an_empty_visible_range_is_not_read() -> None:
    rig = Rig()
    view = rig.view(rig.tree(l0=[rig.add([put(b"b")], visible=KeyRange(b"x", b"y"))]))
    rig.store.reset()
    assert get(rig.sst_store, view, b"b", MAX_SEQ) is None
    assert requests(rig) == 0


def test_keys_are_routed_to_their_segment() -> None:
    rig = Rig()
    left, right = rig.add([put(b"a/1")]), rig.add([put(b"c/1", 2)])
    segments = [Segment(b"a/", rig.tree(l0=[left])), Segment(b"c/", rig.tree(runs=[[right]]))]
    view = rig.builder.build(rig.manifest(segments=segments), [PlainMemtable([put(b"b/9", 3)])])
    found = multi_get(rig.sst_store, view, [b"a/1", b"a/2", b"b/9", b"b/1", b"c/1", b""], MAX_SEQ)
    assert found == [put(b"a/1"), None, put(b"b/9", 3), None, put(b"c/1", 2), None]


def test_ssts_of_a_lender_are_read_from_its_path() -> None:
    rig = Rig()
    sst = rig.add([put(b"a")])
    own, theirs = DbPaths("db").sst(sst.sst_id), DbPaths("parent/db").sst(sst.sst_id)
    rig.store.copy(own, theirs)
    rig.store.delete(own)
    ids = Ids()
    external = ExternalDb("parent/db", ids.uuid(), ids.uuid(), (sst.sst_id,))
    manifest = replace(rig.manifest(rig.tree(l0=[sst])), external_dbs=(external,))
    assert get(rig.sst_store, rig.builder.build(manifest), b"a", MAX_SEQ) == put(b"a")


def test_a_get_of_a_deleted_object_raises_sst_gone() -> None:
    rig = Rig()
    sst = rig.add([put(b"a")])
    view = rig.view(rig.tree(l0=[sst]))
    rig.store.delete(DbPaths("db").sst(sst.sst_id))
    with pytest.raises(SstGone, match="newer") as caught:
        get(rig.sst_store, view, b"a", MAX_SEQ)
    assert isinstance(caught.value, Unavailable)
    assert caught.value.sst_id == sst.sst_id
    assert pickle.loads(pickle.dumps(caught.value)).path == caught.value.path


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("place", ["block", "filter", "index", "short"])
def test_a_get_from_a_damaged_block_raises_its_object_and_offset(codec: Codec, place: str) -> None:
    rig = Rig(codec=codec)
    sst = rig.add([put(number) for number in range(200)])
    info = rig.ssts[sst.sst_id].info
    path = DbPaths("db").sst(sst.sst_id)
    data = bytearray(rig.store.get(path).data)
    offset = {"block": 0, "filter": info.filter_offset, "index": info.index_offset, "short": 0}[place]
    data[offset + 5] ^= 0x40
    rig.store.put(path, bytes(data[:100]) if place == "short" else bytes(data))
    view = rig.view(rig.tree(l0=[sst]))
    with pytest.raises(CorruptData) as caught:
        get(rig.sst_store, view, b"%08d" % 0, MAX_SEQ)
    assert caught.value.object == path
    assert caught.value.offset is not None
    if place != "short":
        assert caught.value.offset == offset


def test_unchanged_ssts_and_runs_are_reused_and_dropped_ones_leave_the_cache() -> None:
    rig = Rig()
    run = [rig.add([put(1)]), rig.add([put(2)])]
    old, new = rig.add([put(3)]), rig.add([put(4)])
    before = rig.view(rig.tree(l0=[old], runs=[run]))
    get(rig.sst_store, before, b"%08d" % 3, MAX_SEQ)
    assert rig.sst_store.cache.held_bytes > 0
    manifest = rig.manifest(rig.tree(l0=[new], runs=[run]))
    kept = {sst_id: sst for sst_id, sst in manifest.ssts.items() if sst_id != old.sst_id}
    after = rig.builder.build(replace(manifest, ssts=kept))
    assert after.layers[1] is before.layers[1]
    assert after.layers[0] is not before.layers[0]
    assert rig.sst_store.cache.held_bytes == 0
    assert get(rig.sst_store, before, b"%08d" % 3, MAX_SEQ) == put(3)


def test_an_sst_stays_the_same_python_object_while_the_store_holds_it() -> None:
    rig = Rig()
    info = rig.ssts[rig.add([put(1)]).sst_id].info
    assert rig.sst_store.open(Ulid(1), info) is rig.sst_store.open(Ulid(1), info)


def v1_block(rows: list[EntryTuple]) -> bytes:
    """A block of format version 1, which no release writes any more; all keys start with `key`."""
    entries, offsets = b"", b""
    for key, seq, kind, value, _, _ in rows:
        offsets += len(entries).to_bytes(2, "big")
        shared = len(b"key") if entries else 0
        entries += shared.to_bytes(2, "big") + (len(key) - shared).to_bytes(2, "big") + key[shared:]
        entries += seq.to_bytes(8, "big") + bytes([kind])
        entries += b"" if kind == TOMBSTONE else len(value).to_bytes(4, "big") + value
    return entries + offsets + len(rows).to_bytes(2, "big")


def test_ssts_of_the_first_format_version_are_readable() -> None:
    rig = Rig()
    rows = [(b"key%03d" % number, 9 - number % 2, 0, b"v", None, None) for number in range(40)]
    rows[7] = (rows[7][0], 5, MERGE, b"m", None, None)
    blocks = [seal(v1_block(rows[:20])), seal(v1_block(rows[20:]))]
    index = seal(index_kernel.encode_index([0, len(blocks[0])], [b"", rows[20][0]]))
    data_bytes = sum(map(len, blocks))
    info = SsTableInfo(rows[0][0], rows[-1][0], data_bytes, len(index), data_bytes, 0)
    footer = encode_footer(info, data_bytes + len(index), 1)
    rig.store.put(DbPaths("db").sst(Ulid(1)), b"".join([*blocks, index, footer]))
    rig.ssts[Ulid(1)] = SsTable(Ulid(1), info, format_version=1)
    view = rig.view(rig.tree(l0=[SstView.whole(Ulid(1))]))
    found = multi_get(rig.sst_store, view, [row[0] for row in rows], MAX_SEQ)
    assert found == [[row] if row[2] == MERGE else row for row in rows]
    for reverse in (False, True):
        request = ScanRequest(max_seq=MAX_SEQ, now_ms=0, merge_operator=Append(), reverse=reverse)
        keys = [row[0] for row in (rows[::-1] if reverse else rows)]
        assert [key for key, _ in Scan(rig.sst_store, view, request)] == keys
