"""Bloom filters, which exclude keys that an SST does not contain.

The filter block is a small directory of named filters (`FilterFormat.COMPOSITE`), or, in files of old
releases, one bare bloom filter (`FilterFormat.LEGACY`):

    composite = count(u16) { name_len(u16) name data_len(u64) data }*        all big endian
    bloom     = probes(u16) bits

Filters of unknown name are skipped: they exclude no key.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.sst_info import FilterFormat
from flagstone.kernels import bloom

DEFAULT_BITS_PER_KEY: Final = 10
DEFAULT_MIN_FILTER_KEYS: Final = 1000
_BLOOM: Final = "_bf"


class PrefixExtractor(Protocol):
    """Extracts the prefix of a key for prefix filters. Its name is stored: never reuse a name for another rule.

    The prefix must not depend on the rest of the key: if some bytes have a prefix, every key that begins with these
    bytes has the same one. So the prefix of a scan shows whether all of its keys have the same extracted prefix.
    """

    @property
    def name(self) -> str: ...

    def prefix(self, key: bytes) -> bytes | None:
        """The prefix of `key`, or None when it has none (then prefix filters never exclude it)."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPrefix:
    """The first `length` bytes; shorter keys have no prefix."""

    name: str
    length: int

    def prefix(self, key: bytes) -> bytes | None:
        return key[: self.length] if len(key) >= self.length else None


@dataclass(frozen=True, slots=True)
class BloomPolicy:
    """One bloom filter per SST: over whole keys, over prefixes, or over both."""

    bits_per_key: int = DEFAULT_BITS_PER_KEY
    extractor: PrefixExtractor | None = None
    whole_keys: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits_per_key <= 1000:
            raise InvalidRequest(
                f"bits_per_key is {self.bits_per_key}; choose 1 to 1000 (10 is a good value)"
            )
        if self.extractor is None and not self.whole_keys:
            raise InvalidRequest("a bloom filter without whole keys needs a prefix extractor")

    @property
    def name(self) -> str:
        """The name of the filter in the file."""
        name = _BLOOM if self.extractor is None else f"{_BLOOM}:p={self.extractor.name}"
        return name if self.whole_keys else f"{name}:wh=0"

    @property
    def probes(self) -> int:
        # SlateDB multiplies single-precision floats and truncates. Double precision gives other counts for some
        # widths.
        return int(_float32(_float32(self.bits_per_key) * _float32(0.69)))


class FilterBuilder:
    """Collects the hashes of one SST's rows, in order, for one policy. Every row counts, also a second of one key."""

    def __init__(self, policy: BloomPolicy) -> None:
        self.policy = policy
        self._hashes = array("Q")
        self._last_prefix: bytes | None = None

    def add_keys(self, keys: list[bytes]) -> None:
        extractor = self.policy.extractor
        if extractor is None:
            self._hashes.extend(bloom.hash_keys(keys))
            return
        for key in keys:
            prefix = extractor.prefix(key)
            if prefix is not None and prefix != self._last_prefix:
                self._hashes.append(bloom.siphash13(prefix))
                self._last_prefix = prefix
            if self.policy.whole_keys:
                self._hashes.append(bloom.siphash13(key))

    def finish(self) -> bytes:
        """The bloom filter's bytes."""
        size = (len(self._hashes) * self.policy.bits_per_key + 7) // 8
        probes = self.policy.probes
        return struct.pack(">H", probes) + bloom.build(self._hashes, size, probes)


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of one SST; `by_name` holds the data of each."""

    by_name: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def whole_key_bloom(self) -> bytes | None:
        """The bloom filter over whole keys, for `kernels.bloom.may_contain_key`; None without one."""
        for name, data in self.by_name.items():
            # Whole-key hashes are in every bloom filter except those marked `wh=0`.
            if (name == _BLOOM or name.startswith(f"{_BLOOM}:")) and not name.endswith(":wh=0"):
                return data
        return None

    def may_contain(self, key: bytes) -> bool:
        """False only when no row of `key` can be in the SST."""
        data = self.whole_key_bloom
        return data is None or bloom.may_contain_key(data, key)

    def may_contain_prefix(self, prefix: bytes, extractor: PrefixExtractor) -> bool:
        """False only when no key whose extracted prefix is `prefix` can be in the SST."""
        stem = f"{_BLOOM}:p={extractor.name}"
        for name in (stem, f"{stem}:wh=0"):
            if name in self.by_name:
                return bloom.may_contain_key(self.by_name[name], prefix)
        return True


def encode_filters(named: Sequence[tuple[str, bytes]]) -> bytes:
    """The composite filter block of these filters, in their order."""
    parts = [struct.pack(">H", len(named))]
    for name, data in named:
        encoded = name.encode()
        parts += [struct.pack(">H", len(encoded)), encoded, struct.pack(">Q", len(data)), data]
    return b"".join(parts)


def decode_filters(raw: bytes, filter_format: FilterFormat) -> Filters:
    """The filters in a decompressed filter block. Raises `CorruptData` with an offset inside it."""
    if filter_format is FilterFormat.LEGACY:
        return Filters({_BLOOM: _checked_bloom(raw, 0)})
    return Filters(dict(_iterate(raw)))


def _iterate(raw: bytes) -> Iterable[tuple[str, bytes]]:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(raw):
            raise CorruptData(f"filter block of {len(raw)} bytes ends in the middle of an entry", offset=at)
        at += size
        return raw[at - size : at]

    for _ in range(int.from_bytes(take(2), "big")):
        name_at = at
        try:
            name = take(int.from_bytes(take(2), "big")).decode()
        except UnicodeDecodeError:
            raise CorruptData("a filter's name is not UTF-8", offset=name_at) from None
        data_at = at
        data = take(int.from_bytes(take(8), "big"))
        yield name, _checked_bloom(data, data_at) if name.startswith(_BLOOM) else data
    if at != len(raw):
        raise CorruptData(f"{len(raw) - at} bytes after the last filter", offset=at)


def _checked_bloom(data: bytes, offset: int) -> bytes:
    if len(data) < 2:
        raise CorruptData(
            f"a bloom filter of {len(data)} bytes has no room for its probe count", offset=offset
        )
    return data


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
