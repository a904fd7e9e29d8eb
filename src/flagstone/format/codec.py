"""The compression codecs the format knows, with the numbers stored in every SST."""

from __future__ import annotations

from enum import IntEnum


class Codec(IntEnum):
    """How the blocks of one SST are compressed. The values are stored: never renumber them."""

    NONE = 0
    SNAPPY = 1
    ZLIB = 2
    LZ4 = 3
    ZSTD = 4

    @property
    def title(self) -> str:
        """The spelling used in settings: "Snappy", "Zlib", "Lz4", "Zstd"; "None" for no compression."""
        return self.name.capitalize()
