"""Why a point read gives what it gives: which memtable, SST, filter and block it asked, and what it fetched."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from flagstone.kernels import bloom
from flagstone.read.drivers import Found, plan_fetch, probe
from flagstone.read.preview import html_rows, shown
from flagstone.read.view import ReadView
from flagstone.runtime.ids import ulid_text
from flagstone.sst.reader import META, Sst
from flagstone.sst.requests import Need, plan_requests
from flagstone.sst.store import Pinned, SstStore
from flagstone.types import MERGE, TOMBSTONE, EntryTuple, Row

_KINDS: Final = {MERGE: "merge operand", TOMBSTONE: "tombstone"}


@dataclass(frozen=True, slots=True)
class Step:
    """One source that a read asked, or would have asked next."""

    source: str
    """`memtable` or `SST`."""

    name: str
    """The number of the memtable, 0 for the newest, or the id of the SST."""

    outcome: str
    """What the source answered, in words."""

    versions: int = 0
    """How many versions of the key it has, as far as the read looked."""

    filter: bool | None = None
    """Whether the bloom filter allows the key; None if there is no filter, or the read did not ask it."""

    block: int | None = None
    """The number of the block that was searched."""

    fetched_bytes: int = 0
    """What this read fetched from the store for this source; 0 if all of it was in memory."""

    answers: bool = False
    """Whether the read ends here."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a point read found its answer."""

    key: bytes
    seq: int
    """The sequence number at which it read."""

    row: Row | None
    """What `get_row` returns."""

    steps: tuple[Step, ...]
    """The sources, newest first."""

    rounds: int
    """How many times the read waited for the store."""

    requests: int
    """The requests for SSTs; those of one round run at the same time."""

    bytes: int
    """The bytes of these requests."""

    @property
    def answered_by(self) -> Step | None:
        """The source of the newest version; None if no source has the key."""
        return next((step for step in self.steps if step.versions), None)

    def _repr_html_(self) -> str:
        """For notebooks: a line per source, without the value."""
        found = (
            "no row" if self.row is None else f"a value of {len(self.row.value)} bytes, number {self.row.seq}"
        )
        title = f"{shown(self.key)}: {found}; {self.requests} requests, {self.bytes} bytes"
        steps = [(f"{step.source} {step.name}", step.outcome, step.fetched_bytes) for step in self.steps]
        return html_rows(title, steps, more=False, names=("source", "answer", "fetched"), texts=True)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without key and row."""
        return {
            "seq": self.seq,
            "found": self.row is not None,
            "rounds": self.rounds,
            "requests": self.requests,
            "bytes": self.bytes,
            "steps": [
                {
                    "source": step.source,
                    "name": step.name,
                    "outcome": step.outcome,
                    "versions": step.versions,
                    "filter": step.filter,
                    "block": step.block,
                    "fetched_bytes": step.fetched_bytes,
                    "answers": step.answers,
                }
                for step in self.steps
            ],
        }


class Trail:
    """A point read that remembers what it fetched. `get` is `drivers.get`."""

    def __init__(self, ssts: SstStore, view: ReadView, key: bytes, max_seq: int) -> None:
        self._ssts = ssts
        self._view = view
        self._key = key
        self._max_seq = max_seq
        self._pinned: Pinned = {}
        self._fetched: dict[Sst, int] = {}
        self.rounds: int = 0
        self.requests: int = 0

    @property
    def bytes(self) -> int:
        """What was fetched."""
        return sum(self._fetched.values())

    def get(self) -> Found:
        """The newest row of the key; see `drivers.probe`."""
        found = probe(self._view, self._key, self._max_seq)
        while isinstance(found, Need):
            needs = plan_requests(plan_fetch(self._view, [(self._key, found)], self._pinned))
            sizes = [(need.sst, _size(need)) for need in needs]
            self._pinned.update(self._ssts.fetch(needs))
            self.rounds += 1
            self.requests += len(needs)
            for sst, size in sizes:
                self._fetched[sst] = self._fetched.get(sst, 0) + size
            found = probe(self._view, self._key, self._max_seq, self._pinned)
        return found

    def steps(self) -> Iterator[Step]:
        """The sources in the order of the read, down to the one that ends it and those below."""
        ended = False
        for number, memtable in enumerate(self._view.memtables):
            versions = memtable.versions(self._key, self._max_seq)
            yield self._step("memtable", str(number), versions, ended=ended)
            ended = ended or _ends(versions)
        for sst in self._view.forest.ssts_of(self._key):
            step, ends = self._sst_step(sst, ended=ended)
            yield step
            ended = ended or ends

    def _sst_step(self, sst: Sst, *, ended: bool) -> tuple[Step, bool]:
        meta = self._pinned.get((sst, META)) or (None if sst.meta is None else sst.meta.pinned)
        fetched = self._fetched.get(sst, 0)
        if ended or meta is None:
            return Step(
                "SST", ulid_text(sst.id), "not asked: newer sources answer", fetched_bytes=fetched
            ), False
        _, first_keys, whole_key_bloom = meta
        allowed = None if whole_key_bloom is None else bool(bloom.may_contain_key(whole_key_bloom, self._key))
        if allowed is False:
            excluded = Step(
                "SST", ulid_text(sst.id), "the filter excludes it", filter=False, fetched_bytes=fetched
            )
            return excluded, False
        versions: list[EntryTuple] = []
        first = max(bisect_left(first_keys, self._key) - 1, 0)
        number = first
        for number in range(first, max(bisect_right(first_keys, self._key), first + 1)):
            raw = self._pinned.get((sst, number)) or sst.held_block(number)
            if raw is None:
                break  # the read ended before this block
            versions += sst.versions_in(raw, self._key, self._max_seq)
            if _ends(versions):
                break
        step = self._step(
            "SST", ulid_text(sst.id), versions, filter=allowed, block=number, fetched_bytes=fetched
        )
        return step, _ends(versions)

    def _step(
        self, source: str, name: str, versions: list[EntryTuple], *, ended: bool = False, **details: Any
    ) -> Step:
        if ended:
            return Step(source, name, "not asked: newer sources answer")
        if not versions:
            wrong = details.get("filter") is True
            return Step(source, name, "no row: the filter was wrong" if wrong else "no row", **details)
        newest = versions[0]
        outcome = f"{_KINDS.get(newest[2], 'value')}, sequence number {newest[1]}"
        return Step(source, name, outcome, len(versions), answers=_ends(versions), **details)


def _ends(versions: list[EntryTuple]) -> bool:
    """Whether a read ends with these versions: they have one that is no merge operand."""
    return any(row[2] != MERGE for row in versions)


def _size(need: Need) -> int:
    if not need.numbers:
        sst: Sst = need.sst
        start, stop = sst.meta_range if sst.index is None else sst.filter_range
        return int(stop - start)
    return int(need.index.stops[need.numbers[-1]] - need.index.offsets[need.numbers[0]])
