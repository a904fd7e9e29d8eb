"""The rows of an L0 SST that is gone, found again in WAL files that were not deleted yet. Pure.

A flush puts the rows between two sequence numbers into an SST: those above the `last_l0_seq` of the manifest before, up
to that of the manifest which names the SST first. Where both manifests are still there, the WAL tells the rows again.
"""

from __future__ import annotations

from typing import NamedTuple

from flagstone.maintenance.repair.facts import Facts
from flagstone.maintenance.repair.wal_order import misplaced
from flagstone.metadata.manifest import Manifest
from flagstone.types import EntryTuple, Ulid


class Rebuilt(NamedTuple):
    """The rows of a lost SST in commit order; `complete` when no WAL file between the first and the last is missing."""

    rows: tuple[EntryTuple, ...]
    complete: bool


def find_rows(facts: Facts, base: Manifest, sst_id: Ulid) -> Rebuilt | None:
    """The rows that a lost L0 SST held, as far as the WAL has them; None when it has none."""
    span = _flushed_span(facts, sst_id)
    prefix = next(
        (
            prefix
            for prefix, tree in ((b"", base.tree), *((part.prefix, part.tree) for part in base.segments))
            if any(view.sst_id == sst_id for view in tree.l0)
        ),
        None,
    )
    if span is None or prefix is None:
        return None
    low, high = span
    files = [facts.wal[wal_id] for wal_id in sorted(facts.wal)]
    bad = {file.id for file in misplaced(files)}
    used = [file for file in files if file.id not in bad and any(low < row[1] <= high for row in file.rows)]
    rows = tuple(
        row for file in used for row in file.rows if low < row[1] <= high and row[0].startswith(prefix)
    )
    if not rows:
        return None
    sequences = {row[1] for file in used for row in file.rows if low < row[1] <= high}
    ids = [file.id for file in used]
    complete = (
        min(sequences) == low + 1
        and max(sequences) == high
        and all(wal_id in facts.wal and wal_id not in bad for wal_id in range(ids[0], ids[-1] + 1))
    )
    return Rebuilt(rows, complete)


def _flushed_span(facts: Facts, sst_id: Ulid) -> tuple[int, int] | None:
    """The sequence numbers of the flush that made the SST, the first one excluded."""
    for number in sorted(facts.manifests):
        state, before = facts.manifests[number], facts.manifests.get(number - 1)
        if number and isinstance(state, Manifest) and sst_id in state.ssts:
            if not isinstance(before, Manifest) or number == 1:
                return None
            return (before.last_l0_seq, state.last_l0_seq) if before.last_l0_seq < state.last_l0_seq else None
    return None
