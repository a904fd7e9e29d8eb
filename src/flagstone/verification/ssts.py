"""Checks SSTs, each completely and on its own: every checksum, every row, and that all its parts agree.

`LocalChecker` reads and checks them in this process; another `Checker` may distribute the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.filter import Filters
from flagstone.format.sst import SstImage, decode_sst
from flagstone.format.sst_info import BlockStats, SsTableInfo, SstStats, SstType
from flagstone.kernels import block_writer
from flagstone.runtime.pool import shared_pool
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import MAX_KEY_BYTES, EntryTuple
from flagstone.verification.report import Finding
from flagstone.wal.frontier import FENCE, VOID

_FETCHED_OBJECTS: Final = 8
_FETCHED_BYTES: Final = 64 * 1024 * 1024
"""How much is fetched at once: enough to hide latency, little enough for memory. A larger object is fetched alone."""


@dataclass(slots=True)
class SstCheck:
    """The result of reading one SST: small, whatever its size. Without `info` the SST is empty, or its footer is
    damaged.
    """

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


def check_sst(data: bytes, path: str, expected_type: SstType) -> SstCheck:
    """Read an SST completely. Damage is added to `problems`; no rows are read after the first damaged block."""
    check = SstCheck(path, len(data))
    if expected_type is SstType.WAL and data in (FENCE, VOID):
        return check
    try:
        image = decode_sst(data, path)
        check.info, check.version = image.info, image.version
        if image.info.sst_type is not expected_type:
            check.fail(f"an SST of type {image.info.sst_type.name} instead of {expected_type.name}")
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
    """What later checks need of a block, so that its rows need not be kept."""

    first_key: bytes
    last_key: bytes
    first_seq: int
    keys: list[bytes]
    stats: BlockStats
    value_bytes: int


def _check_rows(check: SstCheck, image: SstImage) -> list[_Block]:
    """Decode all rows and check their order. WAL rows are in order of their sequence numbers."""
    ordered = image.info.sst_type is SstType.COMPACTED
    # The block writer checks the order of rows, faster than a comparison in Python.
    judge = block_writer.BlockWriter(65536, ordered=ordered, want_hashes=False)
    blocks: list[_Block] = []
    for number, rows in enumerate(image.rows()):
        offset = image.index.offsets[number]
        if not rows:
            check.fail(f"block {number} holds no row", offset)
            continue
        if any(len(row[0]) > MAX_KEY_BYTES for row in rows):
            _check_long(check, rows, number, offset, ordered=ordered)
            judge = block_writer.BlockWriter(65536, ordered=ordered, want_hashes=False)
        else:
            try:
                judge.add_rows(rows)
                judge.take(0)
            except InvalidRequest as error:
                check.fail(f"block {number}: {error}", offset)
                judge = block_writer.BlockWriter(65536, ordered=ordered, want_hashes=False)
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


def _check_long(check: SstCheck, rows: list[EntryTuple], number: int, offset: int, *, ordered: bool) -> None:
    """Check the order of a block with keys so long that only SlateDB writes them, and the block writer refuses them."""
    for one, following in pairwise(rows) if ordered else ():
        if (one[0], -one[1]) >= (following[0], -following[1]):
            check.fail(f"block {number}: rows are out of order", offset)
            return


def _note_rows(check: SstCheck, rows: list[EntryTuple]) -> None:
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


def _check_index(check: SstCheck, image: SstImage, blocks: list[_Block]) -> None:
    """Each separator is above all keys before its block and not above the block's own first key."""
    previous: bytes | None = None
    for number, (block, separator) in enumerate(zip(blocks, image.index.first_keys, strict=False)):
        straddles = previous == block.first_key
        if separator > block.first_key or (previous is not None and separator <= previous and not straddles):
            check.fail(f"index key {separator!r} does not lead to block {number}", image.info.index_offset)
        previous = block.last_key


def _check_ends(check: SstCheck, image: SstImage) -> None:
    info = image.info
    if info.first_entry != check.first_key:
        check.fail(f"the first key is {check.first_key!r}, SsTableInfo has {info.first_entry!r}")
    # SSTs of old releases do not have their last key in SsTableInfo.
    if info.last_entry is not None and info.last_entry != check.last_key:
        check.fail(f"the last key is {check.last_key!r}, SsTableInfo has {info.last_entry!r}")


def _check_filters(check: SstCheck, image: SstImage, filters: Filters, blocks: list[_Block]) -> None:
    """Check every bloom filter for false negatives."""
    denied = sum(1 for block in blocks for key in block.keys if not filters.may_contain(key))
    if denied:
        check.fail(
            f"the filter has {denied} false negatives: keys that the SST holds", image.info.filter_offset
        )


def _check_stats(check: SstCheck, image: SstImage, stats: SstStats, blocks: list[_Block]) -> None:
    puts, deletes, merges = (sum(counts) for counts in zip(*(block.stats for block in blocks), strict=True))
    actual = SstStats(
        puts,
        deletes,
        merges,
        sum(len(key) for block in blocks for key in block.keys),
        sum(block.value_bytes for block in blocks),
        # Old SSTs have no block statistics.
        tuple(block.stats for block in blocks) if stats.blocks else (),
    )
    if stats != actual:
        check.fail(
            "the row counts and sizes in the stats block do not match the rows", image.info.stats_offset
        )


def _check_wal(check: SstCheck, image: SstImage, blocks: list[_Block]) -> None:
    for number, (block, key) in enumerate(zip(blocks, image.index.first_keys, strict=False)):
        if key != block.first_seq.to_bytes(8, "big"):
            check.fail(
                f"the index has {key.hex()} as the first sequence number of block {number}",
                image.info.index_offset,
            )
    if blocks and image.info.first_entry != blocks[0].first_seq.to_bytes(8, "big"):
        check.fail(f"the first sequence number is {blocks[0].first_seq}, SsTableInfo has another one")


@dataclass(frozen=True, slots=True)
class Subject:
    """An SST or WAL file to check. `bytes` is its approximate size."""

    path: str
    kind: SstType
    bytes: int


class Checker(Protocol):
    """Reads SSTs and WAL files, and checks each on its own, without what refers to them."""

    def check(self, subjects: Sequence[Subject]) -> Iterable[SstCheck | None]:
        """The results, in the same order; None for an object that does not exist.

        Raises `Unavailable` if the store does not answer.
        """
        ...


class LocalChecker:
    """Checks in this process, one SST after the other, and fetches several at once."""

    def __init__(self, store: ObjectStore, wal_store: ObjectStore) -> None:
        self._store = store
        self._wal_store = wal_store

    def check(self, subjects: Sequence[Subject]) -> Iterator[SstCheck | None]:
        """See `Checker`."""
        for batch in plan_batches(subjects):
            fetched = shared_pool().map_ordered(self._fetch, batch)
            for subject in batch:
                data = fetched.pop(0)
                yield None if data is None else check_sst(data, subject.path, subject.kind)

    def _fetch(self, subject: Subject) -> bytes | None:
        store = self._wal_store if subject.kind is SstType.WAL else self._store
        try:
            return store.get(subject.path).data
        except ObjectMissing:
            return None


def plan_batches(subjects: Sequence[Subject]) -> Iterator[list[Subject]]:
    """The subjects in groups that are fetched together. Pure."""
    batch: list[Subject] = []
    size = 0
    for subject in subjects:
        if batch and (len(batch) == _FETCHED_OBJECTS or size + subject.bytes > _FETCHED_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(subject)
        size += subject.bytes
    if batch:
        yield batch
