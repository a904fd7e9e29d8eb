"""Every SST of the corpus decodes, and encoding its rows again gives back its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flagstone.format.codec import Codec
from flagstone.format.filter import BloomPolicy, FixedPrefix
from flagstone.format.sst import SstImage, decode_sst
from flagstone.format.sst_info import SstType
from flagstone.kernels import block_writer
from flagstone.sst.builder import WAL_BLOCK_BYTES, EncodedSst, SstOptions
from golden.corpus import DATA, ssts
from kit.ssts import MemoryBuilder

SMALL_BLOCKS = {"blocks_1k", "compaction_multi_sst"}
IDS = {path: str(path.relative_to(DATA)) for path in ssts()}
VERSION_2 = [path for path in ssts() if "handmade_v1" not in path.parts]
every_table = pytest.mark.parametrize("path", ssts(), ids=IDS.get)
every_v2_table = pytest.mark.parametrize("path", VERSION_2, ids=IDS.get)


def image_of(path: Path) -> SstImage:
    return decode_sst(path.read_bytes(), IDS[path])


def block_bytes(path: Path, image: SstImage) -> int:
    case = path.relative_to(DATA).parts[0]
    if image.info.sst_type is SstType.WAL:
        return WAL_BLOCK_BYTES
    return 1024 if case in SMALL_BLOCKS else 65536 if case == "blocks_64k" else 4096


def test_the_corpus_has_all_its_ssts() -> None:
    assert len(ssts()) == 150


@every_table
def test_every_part_of_an_sst_decodes_and_agrees_with_the_others(path: Path) -> None:
    image = image_of(path)
    blocks = list(image.rows())
    rows = [row for block in blocks for row in block]
    if image.info.sst_type is SstType.WAL:
        assert image.info.first_entry == rows[0][1].to_bytes(8, "big")
        assert [row[1] for row in rows] == sorted(row[1] for row in rows)
        return
    assert image.info.first_entry == rows[0][0]
    assert rows == sorted(rows, key=lambda row: (row[0], -row[1]))
    filters = image.filters()
    assert filters is None or all(filters.may_contain(row[0]) for row in rows)
    stats = image.stats()
    if stats is not None:
        assert stats.num_puts + stats.num_deletes + stats.num_merges == len(rows)
        assert [sum(block) for block in stats.blocks] == [len(block) for block in blocks]


@every_v2_table
def test_data_blocks_encode_to_the_same_bytes_from_rows(path: Path) -> None:
    image = image_of(path)
    writer = block_writer.BlockWriter(
        block_bytes(path, image), ordered=image.info.sst_type is SstType.COMPACTED
    )
    for block in image.rows():
        writer.add_rows(block)
    assert writer.finish_blocks() == [image.block(number) for number in range(len(image.index))]


@every_v2_table
def test_ssts_are_written_with_the_bytes_of_the_official_writer(path: Path) -> None:
    """Except that LZ4 and zlib have several right answers: there the parts must decode alike."""
    image = image_of(path)
    filters = image.filters()
    prefixes = (BloomPolicy(16, FixedPrefix("p4", 4), whole_keys=False),) if "filters" in path.parts else ()
    options = SstOptions(
        block_bytes=block_bytes(path, image),
        codec=image.info.codec,
        min_filter_keys=1 if filters else 10**9,
        filters=(BloomPolicy(), *prefixes),
    )
    for built in _built(image, options):
        _check(built, image)


def _built(image: SstImage, options: SstOptions) -> Iterator[EncodedSst]:
    builder = MemoryBuilder(options, sst_type=image.info.sst_type)
    for block in image.rows():
        builder.add_rows(block)
    yield builder.encoded()
    if image.info.sst_type is SstType.COMPACTED:
        row_by_row = MemoryBuilder(options)
        for block in image.rows():
            for row in block:
                row_by_row.add_row(row)
        yield row_by_row.encoded()


def _check(built: EncodedSst, image: SstImage) -> None:
    if image.info.codec in (Codec.LZ4, Codec.ZLIB):
        again = decode_sst(built.data, "again")
        assert list(again.rows()) == list(image.rows())
        assert again.filters() == image.filters()
        assert again.stats() == image.stats()
        assert again.index.first_keys == image.index.first_keys
    else:
        assert built.data == image.data
        assert built.info == image.info
