"""An open SST: an object on the store, and the parts of it that are in memory.

Opening an SST makes no request: the manifest has its record, which says where every part is. Filters and index are
adjacent, so a point read fetches both in one request. A scan of a key range needs no filter and fetches the index.
Blocks are fetched on demand. Nothing here reads the store or waits: `sst.store` fetches, and `sst.cache` decides what
stays in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flagstone.errors import CorruptData
from flagstone.format.codec import CHECKSUM_BYTES, Codec
from flagstone.format.filter import Filters
from flagstone.format.sst import (
    FORMAT_V2,
    BlockIndex,
    damaged_block,
    decode_footer,
    decode_rows,
    encode_footer,
    footer_range,
    open_block,
    open_filters,
    open_index,
)
from flagstone.format.sst_info import SsTableInfo
from flagstone.kernels import block_reader, bloom, probe, sealing
from flagstone.store.paths import DbPaths
from flagstone.types import EntryTuple, Ulid

META: Final = -1
"""The number of index and filters together, where other numbers mean blocks: a point read needs both."""

FILTERS: Final = -2
"""The number of the filters alone: scans test prefixes with them."""

INDEX: Final = -3
"""The number of the index alone: a scan of a key range needs no filter."""


if TYPE_CHECKING:

    class Resident:
        """The parts of one SST that are in memory: the compiled base class of `Sst`.

        A Cython decorator hides the kernel's class from type checkers, so its methods are declared here. The signatures
        are those of `kernels/_probe.py`.
        """

        def __init__(
            self,
            may_contain: Callable[..., Any],
            find_row: Callable[[bytes, bytes, int], Any],
            find_versions: Callable[[bytes, bytes, int], list[EntryTuple]],
            find_value: Callable[[bytes, bytes, int], Any] | None = None,
        ) -> None: ...
        def hold_meta(self, index: BlockIndex, first_keys: list[bytes], bloom: bytes | None) -> None: ...
        def release_meta(self) -> None: ...
        def held_index(self) -> BlockIndex | None: ...
        def hold_block(self, number: int, raw: bytes, count: int) -> None: ...
        def release_block(self, number: int) -> bytes | None: ...
        def holds(self, number: int) -> bool: ...
        def held_numbers(self) -> list[int]: ...
        def held_block(self, number: int) -> bytes | None: ...
        def held_blocks(self, start: int, stop: int) -> list[bytes]: ...
        def take_touch(self, number: int) -> bool: ...
        def take_counts(self) -> tuple[int, int, int, int, int]: ...
        def damaged(self, number: int, error: CorruptData) -> CorruptData: ...

else:
    Resident = probe.Resident


@dataclass(frozen=True, slots=True)
class SstMeta:
    """The index and the filters of an SST."""

    index: BlockIndex
    filters: Filters | None

    @property
    def pinned(self) -> tuple[BlockIndex, list[bytes], bytes | None]:
        """The same, in the form that `kernels.probe.find` takes."""
        known = self.filters
        return self.index, self.index.first_keys, None if known is None else known.whole_key_bloom


class Sst(Resident):
    """One open SST. Two of them are equal only if they are the same Python object.

    `path` is that of its object, or the paths of the database that owns it. With `fetched_whole` the request for index
    and filters fetches the blocks, too. `record_checked` says that the record comes from a manifest with a checksum.

    Index and filters are in memory together or one without the other. Point reads (the base class) see them when both
    are there.

    Safe to use from many threads: each part in memory is replaced as a whole, and a part that a reader holds stays
    valid. After its object was deleted, an SST still serves reads from memory.
    """

    __slots__ = (
        "_index_touched", "_path", "fetched_whole", "filters", "format_version", "id", "index", "info",
        "record_checked",
    )  # fmt: skip

    def __init__(
        self,
        sst_id: Ulid,
        path: str | DbPaths,
        info: SsTableInfo,
        format_version: int = FORMAT_V2,
        fetched_whole: bool = False,
        *,
        record_checked: bool = False,
    ) -> None:
        Resident.__init__(self, *(_FINDERS if format_version == FORMAT_V2 else _FINDERS_V1))
        self.id: Ulid = sst_id
        self._path = path
        self.info: SsTableInfo = info
        self.format_version: int = format_version
        self.fetched_whole: bool = fetched_whole
        self.record_checked: bool = record_checked
        self.index: BlockIndex | None = None
        """The index, if it is in memory."""
        self.filters: Filters | None = None
        """The filters, if the SST has any and they are in memory."""
        self._index_touched = False

    def __repr__(self) -> str:
        return f"Sst({self.path!r})"

    @property
    def path(self) -> str:
        """The path of the object; made on demand, because most SSTs of a large database are never read."""
        return self._path if isinstance(self._path, str) else self._path.sst(self.id)

    @property
    def meta_range(self) -> tuple[int, int]:
        """From the filters to the end of the file; from byte 0 if the SST is fetched whole."""
        return (0 if self.fetched_whole else self.filter_range[0]), self.footer_range[1]

    @property
    def filter_range(self) -> tuple[int, int]:
        """The filters; of an SST without filters, no byte in front of the index."""
        info = self.info
        if not info.filter_len:
            return info.index_offset, info.index_offset
        return info.filter_offset, info.filter_offset + info.filter_len

    @property
    def index_range(self) -> tuple[int, int]:
        """The index, to the end of the file if the footer has to be compared with the record.

        The statistics lie between index and footer. They are a quarter of all three.
        """
        info = self.info
        end = self.footer_range[1]  # refuses a record that fits no file
        return info.index_offset, info.index_offset + info.index_len if self.record_checked else end

    @property
    def footer_range(self) -> tuple[int, int]:
        """Where the footer is if this release wrote it; see `has_footer`."""
        try:
            return footer_range(self.info, self.format_version)
        except CorruptData as error:
            raise CorruptData(f"as the manifest describes it, {error.problem}", object=self.path) from None

    @property
    def held_meta_bytes(self) -> int:
        """The size of index and filters in memory, as the cache counts it."""
        info = self.info
        index = 0 if self.index is None else info.index_len
        return index if self.filters is None else index + info.filter_len

    @property
    def meta(self) -> SstMeta | None:
        """Index and filters, if both are in memory."""
        index = self.held_index()
        return None if index is None else SstMeta(index, self.filters)

    def use_index(self) -> BlockIndex | None:
        """The index, with or without the filters, if it is in memory. Counts as a use."""
        index = self.index
        if index is not None:
            self._index_touched = True
        return index

    def hold_parts(self, index: BlockIndex | None, filters: Filters | None) -> None:
        """Keep the index, the filters, or both. Point reads see them as soon as both are in memory."""
        if filters is not None:
            self.filters = filters
        if index is not None:
            self.index = index
        if self.index is not None and (self.filters is not None or not self.info.filter_len):
            self.hold_meta(*SstMeta(self.index, self.filters).pinned)

    def release_parts(self) -> None:
        """Forget index and filters; blocks stay."""
        self.release_meta()
        self.index = None
        self.filters = None

    def take_meta_touch(self) -> bool:
        """Whether the index was used since the last question."""
        touched = self.take_touch(META) or self._index_touched
        self._index_touched = False
        return touched

    def versions_in(self, raw: bytes, key: bytes, max_seq: int) -> list[EntryTuple]:
        """The versions of a key in one of its blocks, newest first."""
        find = block_reader.lookup_versions if self.format_version == FORMAT_V2 else _find_versions_v1
        found: list[EntryTuple] = find(raw, key, max_seq)
        return found

    def decode_index(self, stored: bytes, base: int) -> BlockIndex:
        """The index; `stored` begins at byte `base` of the object. Raises `CorruptData` with object and offset."""
        info = self.info
        start, stop = info.index_offset, info.index_offset + info.index_len
        self._check_length(stored[: stop - base], base, stop)
        index = open_index(stored[start - base : stop - base], info, self.path)
        if self.record_checked:  # then the footer may not have come with it
            self._check_keys(index)
        return index

    def decode_filters(self, stored: bytes, base: int) -> Filters | None:
        """As `decode_index` for the filters; None if there are none."""
        start, stop = self.filter_range
        self._check_length(stored[: stop - base], base, stop)
        return open_filters(stored[start - base : stop - base], self.info, self.path)

    def _check_keys(self, index: BlockIndex) -> None:
        """Compare the keys of the index with those of the record: those of another SST are damage."""
        first, last = self.info.first_entry, self.info.last_entry
        if len(index) > 1 and (
            (first is not None and index.first_keys[1] < first)
            or (last is not None and index.first_keys[-1] > last)
        ):
            raise CorruptData(
                "the keys of its index are not between the first and the last key in the manifest",
                object=self.path,
                offset=self.info.index_offset,
            )

    def has_footer(self, stored: bytes, start: int) -> bool:
        """Whether the footer equals the manifest's record. `stored` is the file from byte `start` on.

        SlateDB before 0.14 encodes the same record differently, which also gives False: `check_footer` then decides.
        """
        offset, _ = self.footer_range
        return stored[offset - start :] == encode_footer(self.info, offset, self.format_version)

    def check_footer(self, tail: bytes, object_bytes: int) -> int | None:
        """Compare the record at the end of the file with the manifest's. Returns the length that `tail` needs, or None.

        Raises `CorruptData` with object and offset if they differ: one of the two is damaged.
        """
        try:
            found = decode_footer(tail, object_bytes)
        except CorruptData as error:
            raise error.within(self.path) from None
        if isinstance(found, int):
            return found
        info, version, offset = found
        if info != self.info or version != self.format_version:
            differing = [
                name for name in SsTableInfo.__slots__ if getattr(info, name) != getattr(self.info, name)
            ]
            raise CorruptData(
                f"its SsTableInfo is not the one in the manifest: {', '.join(differing) or 'format version'} differ",
                object=self.path,
                offset=offset,
            )
        return None

    def decode_blocks(
        self, stored: bytes, index: BlockIndex, numbers: Sequence[int], base: int
    ) -> list[bytes]:
        """The raw bytes of the blocks `numbers`, ascending; `stored` begins at byte `base` of the object.

        Raises `CorruptData` with object and offset.
        """
        spans = [(index.offsets[number] - base, index.stops[number] - base) for number in numbers]
        if self.info.codec is Codec.NONE and _whole(stored, spans):
            return [stored[start : stop - CHECKSUM_BYTES] for start, stop in spans]
        return [self._decode_block(stored[start:stop], base + start, base + stop) for start, stop in spans]

    def _decode_block(self, stored: bytes, start: int, stop: int) -> bytes:
        self._check_length(stored, start, stop)
        return open_block(stored, self.info, self.path, start, version=self.format_version)

    def rows_of(self, raw: bytes, number: int) -> list[EntryTuple]:
        """All rows of a block in stored order. Raises `CorruptData` with object and block."""
        try:
            return decode_rows(raw, self.format_version)
        except CorruptData as error:
            raise self.damaged(number, error) from None

    def damaged(self, number: int, error: CorruptData) -> CorruptData:
        """`error` with the object, the block, and its offset if the index is in memory."""
        index = self.index
        offset = None if index is None else index.offsets[number]
        return damaged_block(error, number, object=self.path, offset=offset)

    def _check_length(self, stored: bytes, start: int, stop: int) -> None:
        if len(stored) != stop - start:
            raise CorruptData(
                f"the object ends {stop - start - len(stored)} bytes before byte {stop}, which it should have",
                object=self.path,
                offset=start + len(stored),
            )


def _whole(stored: bytes, spans: list[tuple[int, int]]) -> bool:
    """Whether all parts are there and their checksums match. On failure the slow path raises the detailed error."""
    bounds = array("q", [edge for start, stop in spans for edge in (start, stop - CHECKSUM_BYTES)])
    if not bounds or min(bounds) < 0 or max(bounds) + CHECKSUM_BYTES > len(stored):
        return False
    damaged: int = sealing.first_damaged(stored, bounds)
    return damaged < 0


def _find_versions_v1(raw: bytes, key: bytes, max_seq: int) -> list[EntryTuple]:
    return [row for row in decode_rows(raw, 1) if row[0] == key and row[1] <= max_seq]


def _find_row_v1(raw: bytes, key: bytes, max_seq: int) -> EntryTuple | None:
    return next(iter(_find_versions_v1(raw, key, max_seq)), None)


_FINDERS: Final = (
    bloom.may_contain_key, block_reader.lookup, block_reader.lookup_versions, block_reader.lookup_value,
)  # fmt: skip
_FINDERS_V1: Final = (bloom.may_contain_key, _find_row_v1, _find_versions_v1)
