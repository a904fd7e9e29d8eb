"""Copies the SSTs of a load with another sequence number, after the database has passed the first one.

Only the numbers and the checksums change, so the copy is as fast as the store: no row is decoded, and filters,
statistics and, without compression, the index stay as they are. A crash leaves SSTs of the load without a reference,
which garbage collection deletes with the load.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from contextlib import closing
from dataclasses import replace
from typing import Final

from flagstone.compaction.inputs import Part, SstFetcher
from flagstone.errors import CorruptData
from flagstone.format.codec import CHECKSUM_BYTES, Codec, seal_parts
from flagstone.format.sst import BlockIndex, damaged_block, footer_range
from flagstone.format.sst_info import SsTableInfo
from flagstone.kernels import renumber, sealing
from flagstone.loads.edit import Load
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.pool import IoPool
from flagstone.runtime.sync import Lock
from flagstone.spark.address import open_store
from flagstone.spark.load.heartbeat import Heartbeat
from flagstone.spark.load.plan import LoadPlan, load_output
from flagstone.sst.builder import BuiltSst
from flagstone.sst.footer import encode_moved_tail
from flagstone.sst.output import SstOutput
from flagstone.store.paths import DbPaths
from flagstone.store.writing import ObjectWriter
from flagstone.types import KeyRange, Seq

_PIECE_BYTES: Final = 4 * 1024 * 1024
_AT_ONCE: Final = 4


def renumber_load(plan: LoadPlan, load: Load, seq: Seq, heartbeat: Heartbeat) -> Load:
    """The load with copies of its SSTs in which every row has the sequence number `seq`.

    Raises:
        Closed: the load was cancelled.
        CorruptData: an SST is damaged.
        Unavailable: the store did not answer, or an SST is gone.

    """
    store, paths = open_store(plan.address)
    lock = Lock()

    def copy(sst: SsTable) -> SsTable:
        with lock:
            heartbeat.touch()
        with load_output(store, paths, plan) as output:
            return _copied(SstFetcher(store), paths, output, sst, seq)

    if len(load.ssts) == 1:
        return replace(load, seq=seq, ssts=(copy(load.ssts[0]),))
    with closing(IoPool(max_workers=_AT_ONCE, name="flagstone-renumber")) as pool:
        return replace(load, seq=seq, ssts=tuple(pool.map_ordered(copy, load.ssts)))


def _copied(fetcher: SstFetcher, paths: DbPaths, output: SstOutput, sst: SsTable, seq: Seq) -> SsTable:
    part = Part(sst, paths.sst(sst.id), KeyRange())
    index = fetcher.fetch_index(sst, part.path)
    sink = output.open()
    offsets = _copy_blocks(fetcher, part, index, sink, seq)
    info: SsTableInfo = sst.info
    parts: tuple[bytes, ...]
    if info.codec is Codec.NONE:
        begin = info.filter_offset if info.filter_len else info.index_offset
        parts = (fetcher.fetch_stored(part, begin, footer_range(info, sst.format_version)[1]),)
    else:
        info, parts = encode_moved_tail(
            info,
            data_bytes=sink.size,
            offsets=offsets,
            index_keys=index.first_keys,
            filters=_part(fetcher, part, info.filter_offset, info.filter_len),
            stats=_part(fetcher, part, info.stats_offset, info.stats_len),
        )
    tail = b"".join(parts)
    sink.write(tail)
    return SsTable(output.commit(BuiltSst(info, 0, sink.size, tail)), info, sst.format_version)


def _copy_blocks(
    fetcher: SstFetcher, part: Part, index: BlockIndex, sink: ObjectWriter, seq: Seq
) -> list[int]:
    """Write all blocks; returns where each begins in the copy."""
    plain = part.sst.info.codec is Codec.NONE
    offsets: list[int] = []
    first = 0
    while first < len(index):
        last = bisect_left(index.stops, index.offsets[first] + _PIECE_BYTES, first, len(index) - 1)
        chunk = fetcher.fetch_chunk(part, index, first, last)
        data = bytearray(chunk.data)
        try:
            renumber.renumber(data, chunk.bounds, seq)
        except CorruptData as error:
            raise _located(error, part, index, first, chunk.bounds) from None
        if plain:
            sealing.stamp(data, chunk.bounds)
            offsets += index.offsets[first : last + 1]
            sink.write(data)
        else:
            pieces: list[bytes] = []
            at = sink.size
            for begin, end in zip(chunk.bounds[::2], chunk.bounds[1::2], strict=True):
                sealed = seal_parts(bytes(data[begin:end]), part.sst.info.codec)
                pieces += sealed
                offsets.append(at)
                at += len(sealed[0]) + CHECKSUM_BYTES
            sink.write(b"".join(pieces))
        first = last + 1
    return offsets


def _located(
    error: CorruptData, part: Part, index: BlockIndex, first: int, bounds: array[int]
) -> CorruptData:
    at = error.offset or 0
    block = next((number for number in range(len(bounds) // 2) if at < bounds[2 * number + 1]), 0)
    inside = CorruptData(error.problem, offset=at - bounds[2 * block])
    number = first + block
    return damaged_block(inside, number, object=part.path, offset=index.offsets[number])


def _part(fetcher: SstFetcher, part: Part, begin: int, size: int) -> bytes:
    return fetcher.fetch_stored(part, begin, begin + size) if size else b""
