"""Forged parts of SSTs raise `CorruptData` without using much memory."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard

from flagstone.errors import CorruptData
from flagstone.format.codec import FREE_BYTES, Codec, compress, decompress, seal, unseal
from flagstone.format.sst import declared_bytes, decode_rows, decode_sst, encode_footer
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.kernels import block_writer
from flagstone.kernels import index as index_kernel

HUGE = 1 << 28


def zstd_bomb(size: int, *, with_size: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=with_size).compressobj(
        size=size if with_size else -1
    )
    zeros = bytes(1 << 22)
    pieces = [compressor.compress(zeros) for _ in range(size >> 22)]
    return b"".join([*pieces, compressor.flush()])


def zlib_bomb(size: int) -> bytes:
    compressor = zlib.compressobj()
    return b"".join([*(compressor.compress(bytes(1 << 22)) for _ in range(size >> 22)), compressor.flush()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "bomb"),
    [
        (Codec.ZSTD, lambda: zstd_bomb(HUGE, with_size=True)),
        (Codec.ZSTD, lambda: zstd_bomb(HUGE, with_size=False)),
        (Codec.ZLIB, lambda: zlib_bomb(1 << 28)),
    ],
)
def test_a_block_that_decompresses_beyond_its_declared_size_raises_with_bounded_memory(
    codec: Codec, bomb: Callable[[], bytes]
) -> None:
    stored = bomb()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match="expands to more"):
            unseal(
                stored + zlib.crc32(stored).to_bytes(4, "big"), codec, lambda head: declared_bytes(head, 2)
            )
        assert tracemalloc.get_traced_memory()[1] < 16 * FREE_BYTES
    finally:
        tracemalloc.stop()


def test_an_index_that_decompresses_beyond_the_ratio_of_zlib_raises_corrupt_data() -> None:
    stored = zstd_bomb(HUGE, with_size=True)
    with pytest.raises(CorruptData, match="expands to more"):
        decompress(Codec.ZSTD, stored)


@pytest.mark.parametrize("codec", [Codec.SNAPPY, Codec.LZ4, Codec.ZLIB, Codec.ZSTD])
@pytest.mark.parametrize("version", [1, 2])
def test_a_single_row_of_any_size_is_read(codec: Codec, version: int) -> None:
    value = bytes(5 * FREE_BYTES)
    if version == 2:
        writer = block_writer.BlockWriter(4096)
        writer.add_rows([(b"key", 1, 0, value, 5, None)])
        raw = writer.finish_blocks()[0]
    else:
        sizes = b"\0\0" + len(b"key").to_bytes(2, "big")
        tail = (1).to_bytes(8, "big") + b"\x04" + (5).to_bytes(8, "big") + len(value).to_bytes(4, "big")
        raw = sizes + b"key" + tail + value + b"\0\0" + b"\0\1"
    assert decompress(codec, compress(codec, raw), lambda head: declared_bytes(head, version)) == raw
    assert decode_rows(raw, version)[0][3] == value


@pytest.mark.parametrize("claimed", [2**31, 2**32 + 5, 2**62])
def test_a_huge_claimed_size_raises_corrupt_data(claimed: int) -> None:
    frame = b"\x28\xb5\x2f\xfd\xe0" + claimed.to_bytes(8, "little") + b"\x01\0\0"
    for stored, codec in ((frame, Codec.ZSTD), (b"\xff\xff\xff\xff\x0f\0", Codec.SNAPPY)):
        with pytest.raises(CorruptData):
            decompress(codec, stored)
    with pytest.raises(CorruptData):
        decompress(Codec.LZ4, b"\xff\xff\xff\xff" + bytes(20))


@pytest.mark.parametrize("version", [1, 2])
def test_a_block_without_a_row_raises_corrupt_data(version: int) -> None:
    with pytest.raises(CorruptData, match="without a row"):
        decode_rows(b"\0\0", version)


@pytest.mark.parametrize("data", [b"", b"\0" * 20])
def test_an_index_without_a_block_raises_corrupt_data_except_in_an_empty_wal_file(data: bytes) -> None:
    index = seal(index_kernel.encode_index([], []))
    for sst_type in SstType:
        info = SsTableInfo(b"k", None, len(data), len(index), len(data), 0, sst_type=sst_type)
        file = data + index + encode_footer(info, len(data) + len(index))
        if sst_type is SstType.WAL and not data:
            assert list(decode_sst(file, "x").rows()) == []
        else:
            with pytest.raises(CorruptData, match="without a block"):
                decode_sst(file, "x")


def test_a_footer_with_wrong_offsets_raises_corrupt_data() -> None:
    for tail in (b"", b"\0" * 10, b"\xff" * 10, b"\0" * 8 + b"\0\2", bytes(14), b"\0" * 30):
        with pytest.raises(CorruptData, match="x at byte"):
            decode_sst(tail, "x")
