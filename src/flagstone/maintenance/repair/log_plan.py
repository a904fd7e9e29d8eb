"""What becomes of the WAL and of times in the future: the rows that are put into SSTs. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flagstone.maintenance.repair.facts import Facts, WalFile
from flagstone.maintenance.repair.findings import CLOCK_TOLERANCE_MS, Findings, some
from flagstone.maintenance.repair.plan import Defect, Removal
from flagstone.maintenance.repair.wal_order import OrderedRows, misplaced, order_rows
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_ms
from flagstone.types import EntryTuple, ManifestId, Ulid, WalId

_NAMED_IDS: Final = 8

# -- the WAL ----------------------------------------------------------------------------------------------


def plan_log(facts: Facts, base: Manifest, found: Findings) -> OrderedRows | None:
    """The rows to take out of the WAL, or None when it can be replayed as it is."""
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
            f"keys {some(keys)}"
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
    """The sequence numbers that a damaged or missing file may have held."""
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


def _find_holes(
    facts: Facts, base: Manifest, needed: list[WalFile], found: Findings
) -> list[tuple[int, int]]:
    """The runs of WAL ids that should exist and do not. The ids are not enumerated: a run may be huge."""
    holes: list[tuple[int, int]] = []
    expected = int(base.replay_after_wal_id) + 1
    ends = [file.id for file in needed]
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
                f"{names} missing, with {len(behind)} files and {rows} rows behind",
                "put the rows of the other files into SSTs, and begin a new WAL",
                "the rows of the missing files" + (f", at most {_span_text(span)}" if span else ""),
            )
        )
    return holes


# -- the clock --------------------------------------------------------------------------------------------


def plan_clock(
    facts: Facts, base: Manifest, log: OrderedRows | None, found: Findings
) -> tuple[set[Ulid], int | None, OrderedRows | None]:
    """L0 SSTs to copy under a present id, the time to reset the clock to, and the rows of the WAL with present times.

    Each is empty, or as it was, when no time is in the future.
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
        if log is None:
            after = max(before, key=lambda file: file.id, default=None)
            log = order_rows(files, after=after, last_l0_seq=base.last_l0_seq)
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
    if log is not None and reset_ms is not None:
        log = replace(log, rows=tuple(_brought_back(row, facts.now_ms) for row in log.rows))
    restamped = {view.sst_id for tree in base.trees for view in tree.l0 if ulid_ms(view.sst_id) > limit_ms}
    for sst_id in sorted(restamped):
        found.add(
            Defect(
                "clock",
                facts.table_path(base, sst_id),
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
    return restamped, reset_ms, log


def _brought_back(row: EntryTuple, now_ms: int) -> EntryTuple:
    """The row as if it were written now, if it was written later than now."""
    key, seq, kind, value, created_ms, expires_ms = row
    if created_ms is None or created_ms <= now_ms:
        return row
    if expires_ms is not None:
        expires_ms -= created_ms - now_ms
    return key, seq, kind, value, now_ms, expires_ms


def _ahead(time_ms: int, facts: Facts) -> str:
    return f"{(time_ms - facts.now_ms) / 1000:,.0f} s"
