"""The local executor: what it reads, writes, records, and how it stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from flagstone.compaction import merging
from flagstone.compaction.extensions import Cancelled
from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.format.codec import Codec, seal
from flagstone.format.sst import decode_sst, encode_footer, footer_range
from flagstone.format.sst_info import SsTableInfo
from flagstone.kernels import index as index_kernel
from flagstone.lsm.tree import BytesRange, SstView, Tree
from flagstone.metadata.compactions import JobContext, TieredSpec
from flagstone.metadata.manifest import ExternalDb, Segment
from flagstone.runtime import metric_names
from flagstone.runtime.ids import ulid_ms
from flagstone.runtime.pool import IoPool
from flagstone.sst.builder import EncodedSst, encode_sst
from flagstone.sst.store import SstGone
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, KeyRange, RunId
from kit.executor import JOB, PATHS, SMALL, ExecutorRig
from kit.ssts import ordered


def row(
    key: bytes, seq: int, value: bytes = b"v", kind: int = VALUE, expires_ms: int | None = None
) -> EntryTuple:
    return (key, seq, kind, value, 1_000 + seq, expires_ms)


def many(first_seq: int, count: int = 400, step: int = 1) -> list[EntryTuple]:
    return [
        row(b"key-%06d" % (number * step), first_seq + number, b"value-%d-" % first_seq * 5)
        for number in range(count)
    ]


def rig_of_overlapping_ssts(**changes: object) -> ExecutorRig:
    rig = ExecutorRig(**changes)  # type: ignore[arg-type]
    rig.set_sources([many(3000), many(2000, step=2), many(1000, step=3), many(1)], min_seq=9000, clock_ms=0)
    return rig


def test_l0_views_and_sorted_runs_of_several_ssts_are_merged() -> None:
    rig = ExecutorRig()
    newest = rig.add_sst([row(b"a", 9), row(b"m", 8, b"", TOMBSTONE)])
    older = rig.add_sst([row(b"m", 7), row(b"x", 6)])
    run = [rig.add_sst([row(b"a", 5)]), rig.add_sst([row(b"m", 4), row(b"n", 3)])]
    rig.set_tree([newest, older], [(4, run)])
    rig.set_barrier(100, 0)
    ssts = rig.run()
    assert rig.rows(ssts) == [row(b"a", 9), row(b"n", 3), row(b"x", 6)]
    assert [context.subcompactions[0].output_ssts for context in rig.records] == [(), ssts]


def test_a_sorted_run_above_the_last_keeps_its_tombstones() -> None:
    rig = ExecutorRig()
    view = rig.add_sst([row(b"a", 9, b"", TOMBSTONE)])
    rig.set_tree([view], [(0, [rig.add_sst([row(b"a", 5)])])])
    rig.set_barrier(100, 0)
    above = rig.run(TieredSpec((view.id,), (), RunId(1)))
    assert rig.rows(above) == [row(b"a", 9, b"", TOMBSTONE)]
    assert rig.run() == ()


def test_expired_rows_are_dropped_and_counted() -> None:
    rig = ExecutorRig()
    rig.set_sources([[row(b"a", 2, expires_ms=50), row(b"b", 1, expires_ms=51)]], min_seq=9, clock_ms=50)
    assert [kept[0] for kept in rig.rows(rig.run())] == [b"b"]
    purged = f"{metric_names.COMPACTOR_EXPIRED_ENTRIES_PURGED}{{entry_type=value}}"
    assert rig.metrics.as_dict()[purged] == 1


def test_a_job_of_a_segment_merges_the_ssts_of_that_segment() -> None:
    rig = ExecutorRig()
    rig.set_tree([rig.add_sst([row(b"zzz", 1)])])
    rig.set_barrier(9, 0)
    view = rig.add_sst([row(b"seg-1", 2)])
    rig.manifest = replace(rig.manifest, segments=(Segment(b"seg", Tree((view,))),))
    spec = TieredSpec((view.id,), (), RunId(0), b"seg")
    assert rig.rows(rig.run(spec)) == [row(b"seg-1", 2)]


def test_ssts_of_a_lender_are_read_from_its_path() -> None:
    rig = ExecutorRig()
    mine, theirs = rig.add_sst([row(b"a", 2)]), rig.add_sst([row(b"b", 1)], owner="parent")
    external = ExternalDb("parent", UUID(int=1), None, (theirs.sst_id,))
    rig.set_tree([mine, theirs])
    rig.manifest = replace(rig.manifest, external_dbs=(external,))
    rig.set_barrier(9, 0)
    assert [kept[0] for kept in rig.rows(rig.run())] == [b"a", b"b"]


@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_is_read_and_written(codec: Codec) -> None:
    rig = ExecutorRig(options=replace(SMALL, codec=codec), max_sst_bytes=4000)
    rig.set_sources([many(1000, step=2), many(1)], min_seq=9000, clock_ms=0)
    other = Codec.ZSTD if codec is Codec.NONE else Codec.NONE
    mixed = rig.add_sst(many(5000, 100), options=replace(SMALL, codec=other))
    rig.set_tree([mixed, *rig.manifest.tree.l0], [(0, rig.manifest.tree.runs[0].views)])
    ssts = rig.run()
    assert len(ssts) > 1
    assert {sst.info.codec for sst in ssts} == {codec}
    newest = {kept[0]: kept for rows in (many(1), many(1000, step=2), many(5000, 100)) for kept in rows}
    assert rig.rows(ssts) == [newest[key] for key in sorted(newest)]


def test_ssts_of_the_first_format_are_read() -> None:
    old = [
        row(b"abc", 3),
        row(b"abd", 2, b"", TOMBSTONE),
        row(b"abd", 1, b"under", expires_ms=70),
        row(b"b", 4, b"op", MERGE),
    ]
    rig = ExecutorRig()
    view = rig.add_encoded(sst_v1(old))
    rig.set_tree([rig.add_sst([row(b"abc", 9)]), view])
    rig.set_barrier(0, 0)
    assert rig.rows(rig.run(rig.spec(5))) == ordered([row(b"abc", 9), *old])


def test_concurrent_subcompactions_give_the_same_rows() -> None:
    alone = rig_of_overlapping_ssts()
    expected = alone.rows(alone.run())
    rig = rig_of_overlapping_ssts(
        max_subcompactions=3, pool=IoPool(max_workers=4), bytes_to_fetch=1, max_sst_bytes=5000
    )
    ssts = rig.run()
    assert rig.rows(ssts) == expected
    assert len(rig.records[0].subcompactions) == 3
    assert len(rig.records) == 1 + len(ssts)
    for before, after in zip(rig.records[:-1], rig.records[1:], strict=True):
        assert after.retention_min_seq == before.retention_min_seq
        grown = 0
        for old, new in zip(before.subcompactions, after.subcompactions, strict=True):
            assert new.range == old.range
            assert new.output_ssts[: len(old.output_ssts)] == old.output_ssts
            grown += len(new.output_ssts) - len(old.output_ssts)
        assert grown == 1
    firsts = [sst.info.first_entry for sst in ssts]
    assert firsts == sorted(firsts)  # type: ignore[type-var]


def test_the_ids_of_new_ssts_are_not_older_than_their_job() -> None:
    rig = rig_of_overlapping_ssts(max_sst_bytes=5000)
    # The clock of this machine is far behind the one that made the id of the job.
    ssts = rig.run()
    assert all(ulid_ms(sst.id) >= ulid_ms(JOB) for sst in ssts)
    assert len({sst.id for sst in ssts}) == len(ssts) > 1


def test_a_resumed_job_keeps_its_recorded_retention_limit() -> None:
    rig = ExecutorRig()
    rig.set_sources([[row(b"k", 9)], [row(b"k", 5)], [row(b"k", 1)]], min_seq=3, clock_ms=0)
    whole = rig.rows(rig.run())
    assert [kept[1] for kept in whole] == [9, 5, 1]
    rig.set_barrier(100, 0)
    again = rig.run(context=JobContext(rig.records[0].subcompactions, rig.records[0].retention_min_seq))
    assert rig.rows(again) == whole


def test_a_cancelled_job_stops_and_keeps_the_ssts_it_wrote() -> None:
    rig = rig_of_overlapping_ssts(max_sst_bytes=5000)
    with pytest.raises(Cancelled):
        rig.run(cancelled=lambda: len(rig.records) > 2)
    finished = rig.records[-1].subcompactions[0].output_ssts
    assert len(finished) == 2
    assert rig.rows(finished)
    resumed = rig.run(context=rig.records[-1])
    assert resumed[:2] == finished
    whole = rig_of_overlapping_ssts(max_sst_bytes=5000)
    assert rig.rows(resumed) == whole.rows(whole.run())


def test_a_job_cancelled_before_it_starts_records_only_its_subcompactions() -> None:
    rig = rig_of_overlapping_ssts()
    with pytest.raises(Cancelled):
        rig.run(cancelled=lambda: True)
    assert all(not part.output_ssts for context in rig.records for part in context.subcompactions)


def test_a_failed_upload_fails_the_job_and_stops_the_other_ranges() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    rig = rig_of_overlapping_ssts(
        store=store, max_subcompactions=3, pool=IoPool(max_workers=4), max_sst_bytes=3000
    )
    store.faults = [Fault("error", nth=2, op="put")]
    with pytest.raises(Unavailable):
        rig.run()
    store.faults = []
    resumed = rig.run(context=rig.records[-1])
    whole = rig_of_overlapping_ssts()
    assert rig.rows(resumed) == whole.rows(whole.run())


def test_a_damaged_block_raises_corrupt_data_with_object_and_block() -> None:
    rig = ExecutorRig()
    view = rig.add_sst(many(1))
    rig.set_tree([view])
    path = PATHS.sst(view.sst_id)
    data = bytearray(rig.store.get(path).data)
    data[3000] ^= 1
    rig.store.put(path, bytes(data))
    with pytest.raises(CorruptData, match="checksum") as raised:
        rig.run()
    assert raised.value.object == path
    assert raised.value.offset is not None
    assert 0 < raised.value.offset <= 3000


def test_a_damaged_block_with_a_valid_checksum_raises_corrupt_data_with_object_and_block() -> None:
    rig = ExecutorRig(bytes_to_fetch=1)
    view = rig.add_sst(many(1))
    path = PATHS.sst(view.sst_id)
    data = bytearray(rig.store.get(path).data)
    offsets = decode_sst(bytes(data), path).index.offsets
    start, stop = offsets[1], offsets[2]
    broken = bytearray(data[start : stop - 4])
    broken[0] = 7  # the first key of a block shares nothing
    data[start:stop] = seal(bytes(broken))
    rig.store.put(path, bytes(data))
    rig.set_tree([view])
    with pytest.raises(CorruptData, match="block 1") as raised:
        rig.run()
    assert (raised.value.object, raised.value.offset) == (path, start)


def test_rows_out_of_order_in_a_source_are_never_written() -> None:
    rig = ExecutorRig()
    first, second = rig.add_sst([row(b"m", 1)]), rig.add_sst([row(b"a", 2)])
    rig.set_tree(runs=[(0, [first, second])])
    with pytest.raises(CorruptData, match="ascend"):
        rig.run()
    assert len(rig.records) == 1


def test_a_missing_sst_and_a_missing_source_fail_the_job() -> None:
    rig = ExecutorRig()
    view = rig.add_sst(many(1))
    rig.set_tree([view])
    with pytest.raises(InvalidRequest, match="out of date"):
        rig.run(TieredSpec((JOB,), (RunId(7),), RunId(7)))
    with pytest.raises(InvalidRequest, match="segment"):
        rig.run(TieredSpec((JOB,), (), RunId(7), b"nowhere"))
    rig.store.delete(PATHS.sst(view.sst_id))
    with pytest.raises(SstGone):
        rig.run()


def test_operands_without_a_merge_operator_fail_the_job() -> None:
    rig = ExecutorRig(merge_operator=None)
    rig.set_sources([[row(b"a", 2, b"+", MERGE)]], min_seq=0, clock_ms=0)
    with pytest.raises(InvalidRequest, match="merge_operator"):
        rig.run()


def test_sources_are_read_in_few_requests_of_bounded_size() -> None:
    inner = MemoryStore()
    sizes: list[int] = []

    class Watching(FaultyStore):
        def get_range(self, path: str, start: int, stop: int) -> bytes:
            sizes.append(stop - start)
            return super().get_range(path, start, stop)

    rig = ExecutorRig(store=Watching(inner), bytes_to_fetch=8000)
    rig.set_sources([many(1, 2000)], min_seq=9000, clock_ms=0)
    view = rig.manifest.tree.runs[0].views[0]
    info = rig.manifest.sst(view).info
    rig.run()
    _, end = footer_range(info, 2)
    assert sizes[0] == end - info.index_offset
    assert max(sizes[1:]) <= 8000 + 1100
    assert sum(sizes[1:]) == info.filter_offset
    assert len(sizes) - 1 <= info.filter_offset / 8000 + 1


def test_only_blocks_of_visible_keys_are_read() -> None:
    store = FaultyStore(MemoryStore())
    rig = ExecutorRig(store=store, bytes_to_fetch=1)
    whole = rig.add_sst(many(1, 2000))
    seen = BytesRange.of(KeyRange(b"key-000500", b"key-000502"))
    rig.set_tree([SstView(rig.ids.ulid(), whole.sst_id, seen)])
    rig.set_barrier(9000, 0)
    store.calls.clear()
    assert [kept[0] for kept in rig.rows(rig.run())] == [b"key-000500", b"key-000501"]
    assert [op for op, _ in store.calls].count("get_range") <= 3


def sst_v1(rows: list[EntryTuple]) -> EncodedSst:
    """An SST of one block as releases before the second format wrote it."""
    first = rows[0][0]
    body, offsets = b"", b""
    for number, (key, seq, kind, value, created_ms, expires_ms) in enumerate(rows):
        shared = 0
        while number and shared < min(len(first), len(key)) and first[shared] == key[shared]:
            shared += 1
        offsets += len(body).to_bytes(2, "big")
        flags = kind | (0x02 if expires_ms is not None else 0) | (0x04 if created_ms is not None else 0)
        body += shared.to_bytes(2, "big") + (len(key) - shared).to_bytes(2, "big") + key[shared:]
        body += seq.to_bytes(8, "big") + bytes([flags])
        for time in (expires_ms, created_ms):
            body += b"" if time is None else time.to_bytes(8, "big", signed=True)
        body += b"" if kind == TOMBSTONE else len(value).to_bytes(4, "big") + value
    block = seal(body + offsets + len(rows).to_bytes(2, "big"))
    index = seal(index_kernel.encode_index([0], [b""]))
    info = SsTableInfo(first, rows[-1][0], len(block), len(index), len(block), 0)
    data = block + index + encode_footer(info, len(block) + len(index), 1)
    return EncodedSst(data, info, len(rows), 1)


def test_the_ssts_of_the_first_format_in_these_tests_have_that_format() -> None:
    assert encode_sst([row(b"a", 1)], SMALL).format_version == 2
    assert sst_v1([row(b"a", 1)]).data[-2:] == b"\0\1"


def test_many_operands_of_one_key_are_merged_with_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ExecutorRig(options=SMALL)
    sources = [
        [row(b"hot", seq, b"%d," % seq, MERGE) for seq in range(first + 6000, first, -1)]
        for first in (12_000, 6000, 0)
    ]
    rig.set_sources(sources, min_seq=99_999, clock_ms=0)
    seen: list[int] = []
    retain_and_filter = merging.retain_and_filter

    def watched(versions: list[EntryTuple], *rest: Any) -> Any:
        seen.append(len(versions))
        return retain_and_filter(versions, *rest)

    monkeypatch.setattr(merging, "retain_and_filter", watched)
    folded = b"".join(b"%d," % seq for seq in range(1, 18_001))
    assert rig.rows(rig.run()) == [row(b"hot", 18_000, folded, MERGE)]
    assert max(seen) <= 4096 + 1
