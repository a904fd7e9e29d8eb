"""Which requests fetch what reads lack. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flagstone.format.sst import BlockIndex
from flagstone.kernels import probe as probe_kernel
from flagstone.sst.reader import INDEX, META, Sst
from flagstone.store.port import MAX_FETCH_BYTES

Need = probe_kernel.Need

MAX_GAP_BYTES: Final = 64 * 1024
"""Blocks closer than this are fetched in one request: the gap costs about a millisecond, another request ten."""


def need_index(sst: Sst) -> Need:
    """The index of an SST without its filters, for a read of a key range."""
    return Need(sst, None, [INDEX])


def plan_requests(needs: Iterable[Need]) -> list[Need]:
    """The same needs, one per request: none twice, adjacent blocks together, the filters with the index."""
    by_sst: dict[Sst, tuple[BlockIndex | None, set[int]]] = {}
    for need in needs:
        index, numbers = by_sst.get(need.sst, (None, set()))
        numbers.update(need.numbers or (META,))
        by_sst[need.sst] = (index or need.index, numbers)
    requests = []
    for sst, (index, numbers) in by_sst.items():
        if META in numbers:
            requests.append(Need(sst, None, []))
        elif INDEX in numbers:
            requests.append(need_index(sst))
        numbers -= {META, INDEX}
        if index is not None:
            requests += [Need(sst, index, span) for span in _spans(index, sorted(numbers))]
    return requests


def _spans(index: BlockIndex, numbers: list[int]) -> Iterable[list[int]]:
    """The ascending numbers, split at wide gaps and where a request would become too large."""
    span: list[int] = []
    for number in numbers:
        if span and (
            index.offsets[number] - index.stops[span[-1]] > MAX_GAP_BYTES
            or index.stops[number] - index.offsets[span[0]] > MAX_FETCH_BYTES
        ):
            yield span
            span = []
        span.append(number)
    if span:
        yield span
