"""Plans the repair of the WAL and of times in the future. Pure.

The rows of the WAL are in the order in which they were committed, whatever their sequence numbers are: one writer at a
time appends, file after file. So a sequence number that does not ascend gets a new value, and no row is given up. A
batch is the rows of one sequence number that ascend by key; a key that does not ascend begins another batch, which
used the same sequence number again.

The rows of a missing L0 SST may still be in the WAL. A flush puts the rows between two sequence numbers into an SST:
those above the `last_l0_seq` of the manifest before, up to that of the first manifest that names the SST. If both
manifests exist, the WAL gives the rows again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from flagstone.metadata.manifest import Manifest
from flagstone.metadata.parallel_wal import allowed_hole, find_parallel_wal
from flagstone.repair.facts import Facts, WalFile
from flagstone.repair.plan import (
    CLOCK_TOLERANCE_MS,
    Defect,
    Findings,
    OrderedRows,
    Removal,
    Renumbered,
    name_some,
)
from flagstone.runtime.ids import ulid_ms
from flagstone.types import EntryTuple, ManifestId, Ulid, WalId

Batch = list[EntryTuple]

_NAMED_IDS: Final = 8


# -- order ------------------------------------------------------------------------------------------------


def batches(rows: Iterable[EntryTuple]) -> Iterator[Batch]:
    """The batches of one WAL file, in commit order."""
    batch: Batch = []
    for row in rows:
        if batch and (row[1] != batch[-1][1] or row[0] <= batch[-1][0]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def repeated_sequence_numbers(file: WalFile) -> tuple[int, ...]:
    """The sequence numbers with which one key is written twice in the file: two batches used them."""
    seen: set[tuple[bytes, int]] = set()
    repeated: set[int] = set()
    for key, seq, *_ in file.rows:
        if (key, seq) in seen:
            repeated.add(seq)
        seen.add((key, seq))
    return tuple(sorted(repeated))


def descends(file: WalFile) -> bool:
    """Whether a sequence number in the file is lower than the one before it."""
    return any(after[1] < before[1] for before, after in zip(file.rows, file.rows[1:], strict=False))


def misplaced(files: Sequence[WalFile]) -> tuple[WalFile, ...]:
    """The files that are out of order with the files before them; without them the WAL is in order.

    A file that is damaged, or that uses a sequence number twice, is one of them.
    """
    found: list[WalFile] = []
    newest = -1
    for file in files:
        low, high = file.min_seq, file.max_seq
        disordered = low is not None and (
            low <= newest or descends(file) or bool(repeated_sequence_numbers(file))
        )
        if file.problem is not None or disordered:
            found.append(file)
        elif high is not None:
            newest = high
    return tuple(found)


def order_rows(files: Sequence[WalFile], *, after: WalFile | None, last_l0_seq: int) -> OrderedRows:
    """The rows of `files` that no SST holds, each batch with its own sequence number or the next free one.

    `after` is the file before the first of them. Rows up to `last_l0_seq` are in SSTs, unless their sequence number had
    been used before: rows of a reused sequence number may be in no SST, so they are kept.
    """
    seen = -1 if after is None or after.max_seq is None else after.max_seq
    last = last_l0_seq
    kept: list[EntryTuple] = []
    moved: list[Renumbered] = []
    for file in files:
        keys: set[bytes] = set()
        before: tuple[int, int | None] | None = None
        for batch in batches(file.rows):
            seq = batch[0][1]
            written = {row[0] for row in batch}
            if before is not None and before[0] == seq and not keys & written:
                # The rest of the batch before, or one with the same sequence number and other keys.
                number = before[1]
            else:
                keys = set()
                in_ssts = seq <= last_l0_seq and seq > seen
                number = None if in_ssts else seq if seq > last else last + 1
                if number is not None and number != seq:
                    moved.append(Renumbered(file.id, file.path, seq, number, tuple(sorted(written))))
            keys |= written
            before, seen = (seq, number), max(seen, seq)
            if number is not None:
                last = max(last, number)
                kept += batch if number == seq else [(row[0], number, *row[2:]) for row in batch]
    return OrderedRows(tuple(kept), last, tuple(moved))


# -- remedies --------------------------------------------------------------------------------------------


def plan_wal(facts: Facts, base: Manifest, found: Findings) -> OrderedRows | None:
    """The rows to move from the WAL into SSTs, or None if the WAL can be replayed as it is."""
    files = [facts.wal[wal_id] for wal_id in sorted(facts.wal)]
    bad = misplaced(files)
    found.removals += [Removal("wal", file.id, file.path) for file in bad]
    before = [file for file in files if file.id <= base.replay_after_wal_id]
    needed = [file for file in files if file.id > base.replay_after_wal_id]
    ordered = order_rows(needed, after=before[-1] if before else None, last_l0_seq=base.last_l0_seq)
    for file in bad:
        _name_bad_file(file, files, ordered, base, found)
    holes = _find_holes(facts, base, needed, found)
    rewritten = bool(holes) or any(file.id > base.replay_after_wal_id for file in bad)
    if facts.replay_problem is not None and not rewritten:
        rewritten = True
        found.add(
            Defect(
                "wal damage",
                facts.paths.wal_folder,
                facts.replay_problem,
                f"put the {len(ordered.rows)} rows of the WAL into SSTs, and begin a new WAL",
                "rows that are missing already",
            )
        )
    return ordered if rewritten else None


def _name_bad_file(
    file: WalFile, files: list[WalFile], ordered: OrderedRows, base: Manifest, found: Findings
) -> None:
    needed = file.id > base.replay_after_wal_id
    aside = "move the file aside"
    if file.problem is not None:
        price = ""
        if needed:
            last = all(other.id <= file.id or not other.rows for other in files)
            span = _lost_span(file, files, base)
            found.wal_ids.append(file.id)
            if span is not None:
                found.sequences.append(span)
            numbers = f", {_span_text(span)}" if span else ""
            kept = f"; {len(file.rows)} rows of its sound blocks are kept" if file.rows else ""
            place = "at the end of the WAL" if last else "in the middle of the WAL"
            price = f"the rows of this file that cannot be read{numbers}{kept} ({place})"
        remedy = f"{aside}, and put the rows of the other files into SSTs" if needed else aside
        found.add(Defect("wal damage", file.path, file.problem, remedy, price))
        return
    moved = [entry for entry in ordered.renumbered if entry.wal_id == file.id]
    if needed and moved:
        keys = [repr(key) for entry in moved for key in entry.keys]
        detail = (
            f"{len(keys)} rows get new sequence numbers, {moved[0].old_seq} becomes {moved[0].new_seq} and so on: "
            f"keys {name_some(keys)}"
        )
        remedy = f"put the rows of the WAL into SSTs in the order they were written, and {aside}; {detail}"
    else:
        remedy = (
            f"{aside}; its rows are in SSTs"
            if not needed
            else (f"put the rows of the WAL into SSTs, and {aside}")
        )
    previous = max(
        (other.max_seq for other in files if other.id < file.id and other.max_seq is not None), default=0
    )
    found.add(
        Defect(
            "wal order",
            file.path,
            f"out-of-order sequence numbers: it holds {file.min_seq} to {file.max_seq}, and the files before it end at "
            f"{previous}",
            remedy,
        )
    )


def _span_text(span: tuple[int, int | None]) -> str:
    first, last = span
    return f"sequence numbers {first} to {last}" if last is not None else f"sequence numbers from {first} on"


def _lost_span(file: WalFile, files: list[WalFile], base: Manifest) -> tuple[int, int | None] | None:
    """The sequence numbers that the rows of a damaged or missing file may have."""
    low = max(
        (other.max_seq for other in files if other.id < file.id and other.max_seq is not None),
        default=int(base.last_l0_seq),
    )
    high = min(
        (other.min_seq for other in files if other.id > file.id and other.min_seq is not None), default=None
    )
    if high is None:
        return (low + 1, None)
    return (low + 1, high - 1) if high - 1 > low else None


def find_unsettled(facts: Facts, base: Manifest) -> WalId | None:
    """The first missing WAL file, if the crash of a writer with several files under way explains the hole."""
    if find_parallel_wal(base) is None:
        return None
    ids = [wal_id for wal_id in facts.wal if wal_id > base.replay_after_wal_id]
    missing = int(base.replay_after_wal_id) + 1
    while missing in facts.wal:
        missing += 1
    last = max(ids, default=0)
    explained = base.wal_id_last_seen < missing < last <= missing + allowed_hole(base)
    return WalId(missing) if explained else None


def _find_holes(
    facts: Facts, base: Manifest, needed: list[WalFile], found: Findings
) -> list[tuple[int, int]]:
    """The ranges of WAL ids whose files are missing. The ids are not enumerated: a range may be huge."""
    holes: list[tuple[int, int]] = []
    expected = int(base.replay_after_wal_id) + 1
    ends = [file.id for file in needed]
    unsettled = find_unsettled(facts, base)
    if unsettled is not None:
        void = sum(wal_id > unsettled for wal_id in ends)
        ends = [wal_id for wal_id in ends if wal_id < unsettled]
        found.add(
            Defect(
                "wal hole",
                facts.paths.wal(unsettled),
                f"missing, with {void} files after it: a writer with several WAL files under way has crashed",
                "fence the WAL; the rows after the hole were not reported as durable, and do not count",
            )
        )
    if base.wal_id_last_seen >= expected and (not ends or base.wal_id_last_seen > ends[-1]):
        ends.append(int(base.wal_id_last_seen) + 1)
    for wal_id in ends:
        if wal_id > expected:
            holes.append((expected, wal_id - 1))
        expected = wal_id + 1
    for first, last in holes:
        behind = [file for file in needed if file.id > last]
        path = facts.paths.wal(WalId(first))
        span = _lost_span(WalFile(first, path, 0), [*facts.wal.values()], base)
        found.wal_ids += range(first, min(last, first + _NAMED_IDS) + 1)
        if span is not None:
            found.sequences.append(span)
        names = f"WAL file {first} is" if first == last else f"WAL files {first} to {last} are"
        rows = sum(len(file.rows) for file in behind)
        found.add(
            Defect(
                "wal hole",
                path,
                f"{names} missing, with {len(behind)} files and {rows} rows after the hole",
                "put the rows of the other files into SSTs, and begin a new WAL",
                "the rows of the missing files" + (f", at most {_span_text(span)}" if span else ""),
            )
        )
    return holes


# -- the clock --------------------------------------------------------------------------------------------


def plan_clock(
    facts: Facts, base: Manifest, rows: OrderedRows | None, found: Findings
) -> tuple[set[Ulid], int | None, OrderedRows | None]:
    """L0 SSTs to copy under a present id, the time to reset the clock to, and the rows of the WAL with present times.

    If no time is in the future, there is no SST and no reset time, and the rows are unchanged.
    """
    limit_ms = facts.now_ms + CLOCK_TOLERANCE_MS
    files = [facts.wal[wal_id] for wal_id in sorted(facts.wal) if wal_id > base.replay_after_wal_id]
    ahead = [row for file in files for row in file.rows if row[4] is not None and row[4] > limit_ms]
    path = facts.paths.manifest(ManifestId(facts.base_id or 1))
    reset_ms = None
    if base.last_l0_clock_tick > limit_ms:
        reset_ms = facts.now_ms
        found.add(
            Defect(
                "clock",
                path,
                f"the newest time in SSTs is {_ahead(base.last_l0_clock_tick, facts)} in the future, so writes are "
                "refused until then",
                "reset the clock of the database to now; rows in SSTs keep their times",
            )
        )
    if ahead:
        reset_ms = facts.now_ms
        before = [file for file in facts.wal.values() if file.id <= base.replay_after_wal_id]
        if rows is None:
            after = max(before, key=lambda file: file.id, default=None)
            rows = order_rows(files, after=after, last_l0_seq=base.last_l0_seq)
        newest = max(row[4] or 0 for row in ahead)
        found.add(
            Defect(
                "clock",
                facts.paths.wal_folder,
                f"{len(ahead)} rows of the WAL are written up to {_ahead(newest, facts)} in the future, so writes are "
                "refused until then",
                "put the rows of the WAL into SSTs with the present time; a TTL counts from now",
            )
        )
    if rows is not None and reset_ms is not None:
        rows = replace(rows, rows=tuple(_clamped_to_now(row, facts.now_ms) for row in rows.rows))
    restamped = {view.sst_id for tree in base.trees for view in tree.l0 if ulid_ms(view.sst_id) > limit_ms}
    for sst_id in sorted(restamped):
        found.add(
            Defect(
                "clock",
                facts.sst_path(base, sst_id),
                f"an L0 SST stamped {_ahead(ulid_ms(sst_id), facts)} in the future; SlateDB flushes nothing after it",
                "copy it under a present id",
            )
        )
    markers = [tree.last_compacted_l0 for tree in base.trees if tree.last_compacted_l0 is not None]
    if any(ulid_ms(marker) > limit_ms for marker in markers):
        found.add(
            Defect(
                "clock",
                path,
                "the L0 SST that was compacted last is stamped in the future",
                "give that record the present time",
            )
        )
        reset_ms = facts.now_ms
    return restamped, reset_ms, rows


def _clamped_to_now(row: EntryTuple, now_ms: int) -> EntryTuple:
    """The row, with the present time if its time is in the future."""
    key, seq, kind, value, created_ms, expires_ms = row
    if created_ms is None or created_ms <= now_ms:
        return row
    if expires_ms is not None:
        expires_ms -= created_ms - now_ms
    return key, seq, kind, value, now_ms, expires_ms


def _ahead(time_ms: int, facts: Facts) -> str:
    return f"{(time_ms - facts.now_ms) / 1000:,.0f} s"


# -- missing SSTs -----------------------------------------------------------------------------------------


class Rebuilt(NamedTuple):
    """The rows of a missing SST in commit order; `complete` if no WAL file between the first and last is missing."""

    rows: tuple[EntryTuple, ...]
    complete: bool


def find_rows(facts: Facts, base: Manifest, sst_id: Ulid) -> Rebuilt | None:
    """The rows of a missing L0 SST that the WAL still has; None if it has none."""
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
    """The sequence numbers of the flush that wrote the SST, without the first one."""
    for number in sorted(facts.manifests):
        state, before = facts.manifests[number], facts.manifests.get(number - 1)
        if number and isinstance(state, Manifest) and sst_id in state.ssts:
            if not isinstance(before, Manifest) or number == 1:
                return None
            return (before.last_l0_seq, state.last_l0_seq) if before.last_l0_seq < state.last_l0_seq else None
    return None
