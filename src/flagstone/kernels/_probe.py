"""Point lookups in what is in memory: which SST, which block, which row. Never blocks, never fetches.

This kernel finds the SST and the block. An SST brings the functions that read its blocks and filters, so that every
format version is searched the same way. Counts are kept here, because a plain addition under the interpreter lock costs
nothing; the SST store collects them now and then.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import common_prefix, compare, get_u64
from cython.cimports.flagstone.kernels._records import finish_record
from cython.cimports.flagstone.kernels._rows import MERGE_KIND

from flagstone.errors import CorruptData

# One view for all SSTs: a view of its own takes each SST longer than everything else.
_NO_HEADS = cython.declare("unsigned long long[::1]", array("Q"))


class Need:
    """What must be fetched before a read can go on: blocks of one SST, or its index and filters.

    `numbers` is empty when the index and filters are needed; otherwise `index` has the places of the blocks.
    """

    __slots__ = ("index", "numbers", "sst")

    def __init__(self, sst: Any, index: Any, numbers: list[int]) -> None:
        self.sst: Any = sst
        self.index: Any = index
        self.numbers: list[int] = numbers


@cython.cclass
class Resident:
    """What of one SST is in memory. Readers take no lock: each field is replaced as a whole.

    `may_contain(bloom, key)`, `find_row(block, key, max_seq)` and `find_versions(block, key, max_seq)` read
    filters and blocks. `find_value` is like `find_row`, but may return a plain value alone, as `bytes`. A touched block
    or index was used since the flag was last cleared.
    """

    index: Any
    first_keys: list | None
    # Of each first key but that of the first block the eight bytes behind the first `skip`, which all share.
    heads: cython.ulonglong[::1]
    skip: cython.Py_ssize_t
    bloom: Any
    blocks: list | None
    touched: bytearray | None
    meta_touched: cython.bint
    may_contain: Any
    find_row: Any
    find_versions: Any
    find_value: Any
    filter_positives: cython.longlong
    filter_negatives: cython.longlong
    false_positives: cython.longlong
    index_hits: cython.longlong
    block_hits: cython.longlong

    def __init__(self, may_contain: Any, find_row: Any, find_versions: Any, find_value: Any = None) -> None:
        self.index = None
        self.first_keys = None
        self.bloom = None
        self.blocks = None
        self.touched = None
        self.meta_touched = False
        self.may_contain = may_contain
        self.find_row = find_row
        self.find_versions = find_versions
        self.find_value = find_row if find_value is None else find_value
        self.heads = _NO_HEADS
        self.skip = 0
        self.filter_positives = self.filter_negatives = self.false_positives = 0
        self.index_hits = self.block_hits = 0
        # An SST refers to bytes, numbers and functions only, so it is in no cycle.
        finish_record(self)

    def hold_meta(self, index: Any, first_keys: list, bloom: Any) -> None:
        """Keep the index and the bloom filter over whole keys (None: ask no filter)."""
        if self.blocks is None:
            self.touched = bytearray(len(first_keys))
            self.blocks = [None] * len(first_keys)
        self.index = index
        self.bloom = bloom
        # The first keys of an SST never change, so neither do these.
        if len(self.heads) == 0:
            self.skip, self.heads = _heads(first_keys)
        self.first_keys = first_keys

    def release_meta(self) -> None:
        """Forget index and filter; blocks stay."""
        self.first_keys = None
        self.bloom = None
        self.index = None
        self.heads = _NO_HEADS

    def held_index(self) -> Any:
        """The index, or None when it is not in memory."""
        if self.first_keys is None:
            return None
        self.meta_touched = True
        return self.index

    def hold_block(self, number: cython.Py_ssize_t, raw: bytes, count: cython.Py_ssize_t) -> None:
        """Keep one block of an SST that has `count` of them."""
        if self.blocks is None:
            self.touched = bytearray(count)
            self.blocks = [None] * count
        self.blocks[number] = raw

    def release_block(self, number: cython.Py_ssize_t) -> Any:
        """Forget one block; returns it, or None when it was not held."""
        raw = None
        if self.blocks is not None:
            raw = self.blocks[number]
            self.blocks[number] = None
        return raw

    def holds(self, number: cython.Py_ssize_t) -> bool:
        """Whether the block (-1: index and filter) is in memory; does not count as use."""
        if number < 0:
            return self.first_keys is not None
        return self.blocks is not None and self.blocks[number] is not None

    def held_numbers(self) -> list:
        """The numbers of all blocks in memory."""
        number: cython.Py_ssize_t
        found: list = []
        if self.blocks is not None:
            for number in range(len(self.blocks)):
                if self.blocks[number] is not None:
                    found.append(number)  # noqa: PERF401
        return found

    def held_block(self, number: cython.Py_ssize_t) -> Any:
        """The block, or None when it is not in memory."""
        raw = None
        if self.blocks is not None:
            raw = self.blocks[number]
            if raw is not None:
                self.block_hits += 1
        return raw

    def held_blocks(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> list:
        """The blocks from `start` on that are in memory without a gap, at most up to `stop`."""
        found: list = []
        if self.blocks is not None:
            while start < stop:
                raw = self.blocks[start]
                if raw is None:
                    break
                found.append(raw)
                start += 1
        self.block_hits += len(found)
        return found

    def take_touch(self, number: cython.Py_ssize_t) -> bool:
        """Whether the block (-1: index and filter) was used since the last question."""
        was: cython.bint
        if number < 0:
            was = self.meta_touched
            self.meta_touched = False
        else:
            was = self.touched is not None and self.touched[number] != 0
            if self.touched is not None:
                self.touched[number] = 0
        return was

    def take_counts(self) -> tuple:
        """What was counted since the last call: filter yes, no, wrong yes; index and block answers from memory."""
        counts = (
            self.filter_positives,
            self.filter_negatives,
            self.false_positives,
            self.index_hits,
            self.block_hits,
        )
        self.filter_positives = self.filter_negatives = self.false_positives = 0
        self.index_hits = self.block_hits = 0
        return counts

    def damaged(self, number: int, error: CorruptData) -> CorruptData:
        """The same error with the number of the block; an SST that knows its object adds the name."""
        return CorruptData(f"block {number}: {error.problem}")


@cython.cclass
class Layer:
    """SSTs in key order that do not overlap, but for a key whose versions straddle a border.

    SST `i` is asked for keys in [starts[i], stops[i]); a stop of None leaves that side open.
    """

    starts: list
    stops: list
    ssts: list

    def __init__(self, starts: list, stops: list, ssts: list) -> None:
        self.starts = starts
        self.stops = stops
        self.ssts = ssts

    def parts(self) -> tuple:
        """The three lists `(starts, stops, ssts)`, which are never changed."""
        return self.starts, self.stops, self.ssts


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _compare(one: bytes, two: bytes) -> cython.int:
    """Below 0, 0 or above 0, as `one` is below, equal to or above `two`."""
    return compare(one, 0, len(one), two, 0, len(two))


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _below(keys: list, key: bytes) -> cython.Py_ssize_t:
    """How many of the ascending keys are below `key`."""
    low: cython.Py_ssize_t = 0
    high: cython.Py_ssize_t = len(keys)
    middle: cython.Py_ssize_t
    while low < high:
        middle = (low + high) >> 1
        if _compare(cython.cast(bytes, keys[middle]), key) < 0:
            low = middle + 1
        else:
            high = middle
    return low


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _head(key: bytes, skip: cython.Py_ssize_t) -> cython.ulonglong:
    """The eight bytes behind the first `skip`, filled up with zeros, as a number that sorts like them."""
    data: cython.p_const_uchar = key
    size: cython.Py_ssize_t = len(key)
    value: cython.ulonglong = 0
    index: cython.Py_ssize_t
    if size >= skip + 8:
        return get_u64(data, skip)
    for index in range(skip, skip + 8):
        value <<= 8
        if index < size:
            value |= data[index]
    return value


@cython.cfunc
def _heads(keys: list) -> tuple:
    """`(skip, heads)` of the first keys of blocks, for `_below_by_heads`."""
    count: cython.Py_ssize_t = len(keys)
    number: cython.Py_ssize_t
    skip: cython.Py_ssize_t
    one: bytes
    two: bytes
    if count < 3:
        return 0, _NO_HEADS
    one = keys[1]
    two = keys[count - 1]
    skip = common_prefix(one, 0, two, 0, min(len(one), len(two)))
    heads = array("Q", bytes(8)) * count
    out: cython.ulonglong[::1] = heads
    for number in range(1, count):
        out[number] = _head(cython.cast(bytes, keys[number]), skip)
    return skip, heads


@cython.cfunc
@cython.exceptval(check=False)
def _below_by_heads(
    keys: list, heads: cython.ulonglong[::1], skip: cython.Py_ssize_t, key: bytes
) -> cython.Py_ssize_t:
    """As `_below`: the heads lie side by side, while each key lies somewhere else in memory."""
    low: cython.Py_ssize_t = 1
    high: cython.Py_ssize_t = len(keys)
    middle: cython.Py_ssize_t
    last: bytes = keys[high - 1]
    wanted: cython.p_const_uchar = key
    other: cython.p_const_uchar = last
    size: cython.Py_ssize_t = len(key)
    shared: cython.Py_ssize_t = common_prefix(wanted, 0, other, 0, min(skip, size))
    head: cython.ulonglong
    if _compare(cython.cast(bytes, keys[0]), key) >= 0:
        return 0
    if shared < skip:
        return high if shared < size and wanted[shared] > other[shared] else 1
    head = _head(key, skip)
    while low < high:
        middle = (low + high) >> 1
        if heads[middle] < head or (
            heads[middle] == head and _compare(cython.cast(bytes, keys[middle]), key) < 0
        ):
            low = middle + 1
        else:
            high = middle
    return low


@cython.cfunc
@cython.inline
@cython.exceptval(-1)
def _collect(rows: list, versions: list) -> cython.int:
    """Add versions down to the first that is no merge operand; 1 when there was one."""
    row: tuple
    for row in versions:
        rows.append(row)
        if row[2] != MERGE_KIND:
            return 1
    return 0


def find(
    memtables: tuple[Any, ...],
    layers: list[Any],
    key: bytes,
    max_seq: object,
    fetched: dict[Any, Any] | None,
    simple: cython.bint = False,
) -> Any:
    """The newest row of `key` with seq <= `max_seq`; None when there is none; a `Need` when memory lacks something.

    Memtables and layers are asked newest first, and the first that has the key answers. Only a merge operand
    is not an answer: then the result is the list of rows, newest first, down to the first that is none.

    With `simple` a row that is a plain value without an expiry may come as the value alone, as `bytes`.

    `fetched` holds what was fetched for this read, whatever the cache did with it since: under `(sst, number)`
    a block, under `(sst, -1)` the tuple `(index, first_keys, bloom)`.
    """
    rows: list | None = None
    layer: Layer
    at: cython.Py_ssize_t
    count: cython.Py_ssize_t
    row: object
    stop: object
    for memtable in memtables:
        row = memtable.get(key, max_seq)
        if row is None:
            continue
        if cython.cast(tuple, row)[2] != MERGE_KIND and rows is None:
            return row
        if rows is None:
            rows = []
        if _collect(rows, memtable.versions(key, max_seq)):
            return rows
    for layer in layers:
        count = len(layer.starts)
        # The last SST that starts below the key, and those that start with it.
        at = _below(layer.starts, key) - 1
        if at < 0:
            at = 0
        while at < count and _compare(cython.cast(bytes, layer.starts[at]), key) <= 0:
            stop = layer.stops[at]
            if stop is None or _compare(key, cython.cast(bytes, stop)) < 0:
                row = _search(layer.ssts[at], key, max_seq, fetched, rows, simple)
                if row is not None:
                    if not isinstance(row, list):
                        return row
                    rows = row
                    if cython.cast(tuple, rows[len(rows) - 1])[2] != MERGE_KIND:
                        return rows
            at += 1
    return rows


@cython.cfunc
def _search(
    sst: Resident, key: bytes, max_seq: object, fetched: dict | None, rows: list | None, simple: cython.bint
) -> Any:
    """`find` in one SST. `rows` are the operands collected so far; the list that comes back extends them."""
    first_keys: list | None = None
    bloom: object = None
    index: object = None
    number: cython.Py_ssize_t
    count: cython.Py_ssize_t
    row: object
    raw: object
    found: cython.bint = False
    # What was fetched for this very read comes first: it is no hit, and using it once is no second use.
    meta = None if fetched is None else fetched.get((sst, -1))
    if meta is not None:
        index, first_keys, bloom = meta
    else:
        first_keys = sst.first_keys
        if first_keys is None:
            return Need(sst, None, [])
        index = sst.index
        bloom = sst.bloom
        sst.meta_touched = True
        sst.index_hits += 1
    if bloom is not None:
        if not sst.may_contain(bloom, key):
            sst.filter_negatives += 1
            return None
        sst.filter_positives += 1
    count = len(first_keys)
    # A separator equal to the key may open a block that continues the key's versions from the block before.
    if meta is None and len(sst.heads) == count:
        number = _below_by_heads(first_keys, sst.heads, sst.skip, key) - 1
    else:
        number = _below(first_keys, key) - 1
    while True:
        if number >= 0:
            raw = None if fetched is None else fetched.get((sst, number))
            if raw is None:
                raw = None if sst.blocks is None else sst.blocks[number]
                if raw is None or sst.touched is None:
                    if number + 1 < count and first_keys[number + 1] == key:
                        return Need(sst, index, [number, number + 1])
                    return Need(sst, index, [number])
                sst.touched[number] = 1
                sst.block_hits += 1
            try:
                if rows is None:
                    row = (sst.find_value if simple else sst.find_row)(raw, key, max_seq)
                    if row is not None:
                        if type(row) is bytes:
                            return row
                        if cython.cast(tuple, row)[2] != MERGE_KIND:
                            return row
                        rows = []
                if rows is not None:
                    versions: list = sst.find_versions(raw, key, max_seq)
                    if versions:
                        found = True
                        # A list of its own: a Need may still come, and then the read begins again.
                        rows = list(rows)
                        if _collect(rows, versions):
                            return rows
            except CorruptData as error:
                raise sst.damaged(number, error) from None
        number += 1
        if number >= count or _compare(cython.cast(bytes, first_keys[number]), key) > 0:
            break
    if found:
        return rows
    if bloom is not None:
        sst.false_positives += 1
    return None
