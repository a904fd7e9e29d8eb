"""Checks one SST from end to end: every checksum, every row, and that all its parts tell the same story."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.filter import Filters
from flagstone.format.sst import SstImage, decode_sst
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.format.stats import BlockStats, SstStats
from flagstone.kernels import block_writer
from flagstone.maintenance.verification.report import Finding
from flagstone.types import MAX_KEY_BYTES, EntryTuple


@dataclass(slots=True)
class TableCheck:
    """What reading one SST showed: small, whatever its size. Without `info` it is empty, or has no sound footer."""

    path: str
    size: int
    info: SsTableInfo | None = None
    version: int = 0
    rows: int = 0
    first_key: bytes | None = None
    last_key: bytes | None = None
    min_seq: int | None = None
    max_seq: int | None = None
    problems: list[Finding] = field(default_factory=list)

    @property
    def is_fence(self) -> bool:
        return not self.problems and not self.rows

    def fail(self, problem: str, offset: int | None = None) -> None:
        self.problems.append(Finding("damage", self.path, problem, offset))


def check_table(data: bytes, path: str, expected_type: SstType) -> TableCheck:
    """Read an SST completely. Damage ends up in `problems`; the first broken block ends the reading of rows."""
    check = TableCheck(path, len(data))
    if expected_type is SstType.WAL and not data:
        return check
    try:
        image = decode_sst(data, path)
        check.info, check.version = image.info, image.version
        if image.info.sst_type is not expected_type:
            check.fail(f"an SST of type {image.info.sst_type.name} in the place of {expected_type.name}")
        blocks = _check_rows(check, image)
        filters, stats = image.filters(), image.stats()
    except CorruptData as error:
        check.problems.append(Finding("damage", error.object or path, error.problem, error.offset))
        return check
    if expected_type is SstType.COMPACTED:
        _check_index(check, image, blocks)
        _check_ends(check, image)
        if filters is not None:
            _check_filters(check, image, filters, blocks)
        if stats is not None:
            _check_stats(check, image, stats, blocks)
    else:
        _check_wal(check, image, blocks)
    return check


@dataclass(slots=True)
class _Block:
    """What the later checks need of a block, so that its rows need not be kept."""

    first_key: bytes
    last_key: bytes
    first_seq: int
    keys: list[bytes]
    stats: BlockStats
    value_bytes: int


def _check_rows(check: TableCheck, image: SstImage) -> list[_Block]:
    """Decode all rows and check their order. WAL rows are in order of their sequence numbers."""
    ordered = image.info.sst_type is SstType.COMPACTED
    # The writer knows the order rows must have; feeding it is faster than comparing here.
    judge = block_writer.BlockWriter(65536, ordered)
    blocks: list[_Block] = []
    for number, rows in enumerate(image.rows()):
        offset = image.index.offsets[number]
        if not rows:
            check.fail(f"block {number} holds no row", offset)
            continue
        if any(len(row[0]) > MAX_KEY_BYTES for row in rows):
            _check_long(check, rows, number, offset, ordered=ordered)
            judge = block_writer.BlockWriter(65536, ordered)
        else:
            try:
                judge.add_rows(rows)
                judge.take()
            except InvalidRequest as error:
                check.fail(f"block {number}: {error}", offset)
                judge = block_writer.BlockWriter(65536, ordered)
        _note_rows(check, rows)
        seqs = [row[1] for row in rows]
        if not ordered and seqs != sorted(seqs):
            check.fail(f"block {number}: sequence numbers go back", offset)
        blocks.append(_describe(rows))
    check.first_key, check.last_key = (
        blocks[0].first_key if blocks else None,
        blocks[-1].last_key if blocks else None,
    )
    return blocks


def _check_long(
    check: TableCheck, rows: list[EntryTuple], number: int, offset: int, *, ordered: bool
) -> None:
    """The order of a block with keys that only SlateDB writes, which our writer does not take."""
    for one, following in pairwise(rows) if ordered else ():
        if (one[0], -one[1]) >= (following[0], -following[1]):
            check.fail(f"block {number}: rows are out of order", offset)
            return


def _note_rows(check: TableCheck, rows: list[EntryTuple]) -> None:
    check.rows += len(rows)
    low, high = min(row[1] for row in rows), max(row[1] for row in rows)
    check.min_seq = low if check.min_seq is None else min(check.min_seq, low)
    check.max_seq = high if check.max_seq is None else max(check.max_seq, high)


def _describe(rows: list[EntryTuple]) -> _Block:
    kinds = [row[2] for row in rows]
    deletes, merges = kinds.count(0x01), kinds.count(0x08)
    return _Block(
        rows[0][0],
        rows[-1][0],
        rows[0][1],
        [row[0] for row in rows],
        BlockStats(len(rows) - deletes - merges, deletes, merges),
        sum([len(row[3]) for row in rows]),
    )


def _check_index(check: TableCheck, image: SstImage, blocks: list[_Block]) -> None:
    """Each separator is above all keys before its block and not above the block's own first key."""
    previous: bytes | None = None
    for number, (block, separator) in enumerate(zip(blocks, image.index.first_keys, strict=False)):
        straddles = previous == block.first_key
        if separator > block.first_key or (previous is not None and separator <= previous and not straddles):
            check.fail(f"index key {separator!r} does not lead to block {number}", image.info.index_offset)
        previous = block.last_key


def _check_ends(check: TableCheck, image: SstImage) -> None:
    info = image.info
    if info.first_entry != check.first_key:
        check.fail(f"first key is {check.first_key!r}, SsTableInfo says {info.first_entry!r}")
    # Files of old releases do not name their last key.
    if info.last_entry is not None and info.last_entry != check.last_key:
        check.fail(f"last key is {check.last_key!r}, SsTableInfo says {info.last_entry!r}")


def _check_filters(check: TableCheck, image: SstImage, filters: Filters, blocks: list[_Block]) -> None:
    """A filter may let strangers pass, but never deny a key the SST holds."""
    denied = sum(1 for block in blocks for key in block.keys if not filters.may_contain(key))
    if denied:
        check.fail(f"the filter denies {denied} keys that the SST holds", image.info.filter_offset)


def _check_stats(check: TableCheck, image: SstImage, stats: SstStats, blocks: list[_Block]) -> None:
    puts, deletes, merges = (sum(counts) for counts in zip(*(block.stats for block in blocks), strict=True))
    actual = SstStats(
        puts,
        deletes,
        merges,
        sum(len(key) for block in blocks for key in block.keys),
        sum(block.value_bytes for block in blocks),
        # Block statistics came later than the others; old files have none.
        tuple(block.stats for block in blocks) if stats.blocks else (),
    )
    if stats != actual:
        check.fail(
            "row counts and sizes in the stats block are not those of the rows", image.info.stats_offset
        )


def _check_wal(check: TableCheck, image: SstImage, blocks: list[_Block]) -> None:
    for number, (block, key) in enumerate(zip(blocks, image.index.first_keys, strict=False)):
        if key != block.first_seq.to_bytes(8, "big"):
            check.fail(f"index says {key.hex()} for the first seq of block {number}", image.info.index_offset)
    if blocks and image.info.first_entry != blocks[0].first_seq.to_bytes(8, "big"):
        check.fail(f"first seq is {blocks[0].first_seq}, SsTableInfo says otherwise")
