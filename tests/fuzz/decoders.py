"""Coverage-guided fuzzing of every decoder: `make fuzz-coverage`.

The first byte of an input chooses the decoder, the rest is what it decodes. A decoder returns a value, or raises
`CorruptData` or `InvalidRequest`; every other exception is a bug. The corpus is made from the golden databases, with
blocks, indexes and filters taken out of their checksums, which no fuzzer would guess.

The kernels run interpreted, so that the fuzzer sees which of their branches an input reaches. `make sanitize` checks
the memory accesses of the compiled form.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

os.environ["FLAGSTONE_KERNELS"] = "interpreted"

import atheris

with atheris.instrument_imports(include=["flagstone"]):
    from flagstone.errors import CorruptData, InvalidRequest
    from flagstone.format.codec import Codec, decompress
    from flagstone.format.filter import decode_filters
    from flagstone.format.sst import decode_footer, decode_rows, decode_sst
    from flagstone.format.sst_info import FilterFormat, decode_info, decode_stats
    from flagstone.keys import tuples
    from flagstone.metadata.boundary import decode_boundary
    from flagstone.metadata.compactions import decode_compactions
    from flagstone.metadata.manifest_codec import decode_manifest

GOLDEN = Path(__file__).parent.parent / "golden" / "data"


def decode_whole_sst(data: bytes) -> None:
    image = decode_sst(data, "sst")
    image.filters()
    image.stats()
    for _ in image.rows():
        pass


def decompressed(codec: Codec) -> Callable[[bytes], object]:
    return lambda data: decompress(codec, data)


DECODERS: tuple[Callable[[bytes], object], ...] = (
    decode_whole_sst,
    lambda data: decode_rows(data, 2),
    lambda data: decode_rows(data, 1),
    lambda data: decode_footer(data, len(data)),
    decode_info,
    decode_stats,
    lambda data: decode_filters(data, FilterFormat.COMPOSITE),
    lambda data: decode_filters(data, FilterFormat.LEGACY),
    decode_manifest,
    decode_compactions,
    lambda data: decode_boundary(data, "boundary"),
    tuples.decode,
    *(decompressed(codec) for codec in Codec),
)


def corpus() -> Iterator[bytes]:
    """One input for each golden object, and for each block of an SST."""
    for path in sorted(GOLDEN.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if path.suffix == ".manifest":
            yield bytes([8]) + data
        elif path.suffix == ".compactions":
            yield bytes([9]) + data
        elif path.suffix == ".boundary":
            yield bytes([10]) + data
        elif path.suffix == ".sst" and len(data) < 20_000:
            yield bytes([0]) + data
            yield bytes([3]) + data[-200:]
            with suppress(CorruptData):
                image = decode_sst(data, "sst")
                for number in range(min(3, len(image.index))):
                    yield bytes([1]) + image.block(number)


def check(data: bytes) -> None:
    if data:
        with suppress(CorruptData, InvalidRequest):
            DECODERS[data[0] % len(DECODERS)](data[1:])


def main() -> None:
    folder = Path(sys.argv[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(corpus()):
        (folder / f"golden{number:05d}").write_bytes(entry)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
