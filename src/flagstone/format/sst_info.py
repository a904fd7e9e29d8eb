"""The record that says where everything in an SST is: in its footer and again in the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from flagstone.errors import CorruptData
from flagstone.format import flat
from flagstone.format.codec import Codec


class SstType(IntEnum):
    """What the rows of an SST are ordered by. Stored: never renumber."""

    COMPACTED = 0
    WAL = 1


class FilterFormat(IntEnum):
    """How the filter block is framed. Stored: never renumber."""

    LEGACY = 0
    COMPOSITE = 1


@dataclass(frozen=True, slots=True)
class SsTableInfo:
    """Offsets and lengths (which include the checksums) of the parts of one SST.

    `first_entry` is the first key, in WAL files the first sequence number as 8 bytes. `last_entry` is the
    last key; WAL files and files of old releases have none. A length of 0 says the part does not exist.
    """

    first_entry: bytes | None
    last_entry: bytes | None
    index_offset: int
    index_len: int
    filter_offset: int
    filter_len: int
    codec: Codec = Codec.NONE
    sst_type: SstType = SstType.COMPACTED
    stats_offset: int = 0
    stats_len: int = 0
    filter_format: FilterFormat = FilterFormat.COMPOSITE

    @property
    def estimated_size(self) -> int:
        """What the compaction scheduler counts an SST as."""
        return self.index_offset + self.index_len


def encode_info(info: SsTableInfo) -> bytes:
    """The bytes of the record, without checksum."""
    return flat.encode(SST_INFO, info)


def decode_info(data: bytes | memoryview) -> SsTableInfo:
    """The record in `data`, which must not include the checksum. Raises CorruptData."""
    return flat.decode(SST_INFO, data)


def _make(values: list[Any]) -> SsTableInfo:
    first_entry, index_offset, index_len, filter_offset, filter_len, codec, sst_type, *rest = values
    last_entry, stats_offset, stats_len, filter_format = rest
    known_codec, known_type, known_filter = (
        _CODECS.get(codec),
        _TYPES.get(sst_type),
        _FILTERS.get(filter_format),
    )
    if known_codec is None or known_type is None or known_filter is None:
        raise CorruptData(f"unknown codec {codec}, SST type {sst_type} or filter format {filter_format}")
    return SsTableInfo(
        first_entry,
        last_entry,
        index_offset,
        index_len,
        filter_offset,
        filter_len,
        known_codec,
        known_type,
        stats_offset,
        stats_len,
        known_filter,
    )


def _take(info: SsTableInfo) -> tuple[object, ...]:
    return (
        info.first_entry,
        info.index_offset,
        info.index_len,
        info.filter_offset,
        info.filter_len,
        info.codec,
        info.sst_type,
        info.last_entry,
        info.stats_offset,
        info.stats_len,
        info.filter_format,
    )


_CODECS: Final = {codec.value: codec for codec in Codec}
_TYPES: Final = {kind.value: kind for kind in SstType}
_FILTERS: Final = {kind.value: kind for kind in FilterFormat}

SST_INFO: Final = flat.Shape(
    "SsTableInfo",
    flat.Bytes(),
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.I8,
    flat.I8,
    flat.Bytes(),
    flat.U64,
    flat.U64,
    flat.I8,
    make=_make,
    take=_take,
)
