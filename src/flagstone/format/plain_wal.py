"""A fast path for WAL files in their usual form: uncompressed blocks, no filters, no statistics.

Of such files `SsTableInfo` always has the same bytes, except for four numbers. So one comparison and one pass over the
checksums replace the decoding of its parts, which takes longer than decoding the rows of a small file. Any other file,
and a damaged one, goes through `format.sst.decode_sst`.
"""

from __future__ import annotations

import struct
from array import array
from typing import Final

from flagstone.format.codec import CHECKSUM_BYTES
from flagstone.format.sst import FOOTER_BYTES, FORMAT_V2
from flagstone.format.sst_info import SsTableInfo, SstType, encode_info
from flagstone.kernels import index as index_kernel
from flagstone.kernels import sealing

_FIRST_SEQ, _INDEX_AT, _INDEX_LEN, _FILTER_AT = (bytes([mark]) * 8 for mark in (0x71, 0x72, 0x73, 0x74))
_SAMPLE: Final = encode_info(
    SsTableInfo(
        first_entry=_FIRST_SEQ,
        last_entry=None,
        index_offset=int.from_bytes(_INDEX_AT, "little"),
        index_len=int.from_bytes(_INDEX_LEN, "little"),
        filter_offset=int.from_bytes(_FILTER_AT, "little"),
        filter_len=0,
        sst_type=SstType.WAL,
    )
)
_NUMBERS: Final = sorted((_FIRST_SEQ, _INDEX_AT, _INDEX_LEN, _FILTER_AT), key=_SAMPLE.index)
_INDEX_AT_NUMBER, _INDEX_LEN_NUMBER, _FILTER_AT_NUMBER = map(
    _NUMBERS.index, (_INDEX_AT, _INDEX_LEN, _FILTER_AT)
)


def _around_numbers() -> list[bytes]:
    """The parts of the sample around its numbers."""
    parts = [_SAMPLE]
    for number in _NUMBERS:
        before, _, after = parts.pop().partition(number)
        parts += before, after
    return parts


_CONSTANTS: Final = tuple(_around_numbers())
_TAIL: Final = struct.Struct(
    f"<{'Q'.join(f'{len(part)}s' for part in _CONSTANTS)}{CHECKSUM_BYTES}x{FOOTER_BYTES}s"
)
"""From `SsTableInfo` to the end of the file."""
_FOOTER: Final = struct.Struct(">QH")


def find_plain_blocks(stored: bytes) -> array[int] | None:
    """Begin and end of each block of a WAL file in the usual form, all its checksums verified; None for any other file.

    None says nothing about damage. `CorruptData` is raised without the offset in the file: let `decode_sst` find it.
    """
    info_at = len(stored) - _TAIL.size
    if info_at <= 0:
        return None
    *tail, footer = _TAIL.unpack_from(stored, info_at)
    numbers = tail[1::2]
    index_at = numbers[_INDEX_AT_NUMBER]
    if (
        tuple(tail[::2]) != _CONSTANTS
        or footer != _FOOTER.pack(info_at, FORMAT_V2)
        or numbers[_FILTER_AT_NUMBER] != index_at
        or index_at + numbers[_INDEX_LEN_NUMBER] != info_at
        or index_at + CHECKSUM_BYTES > info_at
    ):
        return None
    offsets, _ = index_kernel.decode_index(stored[index_at : info_at - CHECKSUM_BYTES])
    stops = [*offsets[1:], index_at]
    if not offsets or offsets[0] or any(map(_is_too_short, offsets, stops)):
        return None
    blocks: array[int] = sealing.bounds_within(offsets, stops, 0, len(offsets) - 1, CHECKSUM_BYTES)
    info_end = len(stored) - FOOTER_BYTES - CHECKSUM_BYTES
    parts = blocks + array("q", (index_at, info_at - CHECKSUM_BYTES, info_at, info_end))
    return None if sealing.first_damaged(stored, parts) >= 0 else blocks


def _is_too_short(start: int, stop: int) -> bool:
    return start + CHECKSUM_BYTES >= stop
