"""The order of a WAL whose sequence numbers are not in order. Pure.

Rows stand in the WAL in the order in which they were committed, whatever their numbers say: one writer at a time
appends, file after file. So a number that does not come after those before it is the one to change, and nothing is
given up. A batch is the rows of one number that ascend by key; a key that does not ascend begins another batch, which
used the same number again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flagstone.maintenance.repair.facts import WalFile
from flagstone.types import EntryTuple

Batch = list[EntryTuple]


@dataclass(frozen=True, slots=True)
class Renumbered:
    """Batches of one WAL file that get another sequence number."""

    wal_id: int
    path: str
    old_seq: int
    new_seq: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows that only the WAL holds, in commit order and under ascending numbers."""

    rows: tuple[EntryTuple, ...]
    last_seq: int
    renumbered: tuple[Renumbered, ...]


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


def repeated_numbers(file: WalFile) -> tuple[int, ...]:
    """The sequence numbers under which one key is written twice in the file: two batches shared them."""
    seen: set[tuple[bytes, int]] = set()
    repeated: set[int] = set()
    for key, seq, *_ in file.rows:
        if (key, seq) in seen:
            repeated.add(seq)
        seen.add((key, seq))
    return tuple(sorted(repeated))


def descends(file: WalFile) -> bool:
    """Whether a number in the file is lower than the one before it."""
    return any(after[1] < before[1] for before, after in zip(file.rows, file.rows[1:], strict=False))


def misplaced(files: Sequence[WalFile]) -> tuple[WalFile, ...]:
    """The files that break the order of those kept before them; without them the WAL is in order.

    A file that is not sound by itself, or that uses a number twice, is one of them.
    """
    found: list[WalFile] = []
    newest = -1
    for file in files:
        low, high = file.min_seq, file.max_seq
        disordered = low is not None and (low <= newest or descends(file) or bool(repeated_numbers(file)))
        if file.problem is not None or disordered:
            found.append(file)
        elif high is not None:
            newest = high
    return tuple(found)


def order_rows(files: Sequence[WalFile], *, after: WalFile | None, last_l0_seq: int) -> OrderedRows:
    """The rows of `files` that no table holds, each batch under its own number or the next free one.

    `after` is the file before the first of them. Rows up to `last_l0_seq` are in tables, unless their number had been
    used by then: a reused number says nothing about tables, so its rows are kept.
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
                # The rest of the batch before, or one that shares its number and none of its keys.
                number = before[1]
            else:
                keys = set()
                in_tables = seq <= last_l0_seq and seq > seen
                number = None if in_tables else seq if seq > last else last + 1
                if number is not None and number != seq:
                    moved.append(Renumbered(file.id, file.path, seq, number, tuple(sorted(written))))
            keys |= written
            before, seen = (seq, number), max(seen, seq)
            if number is not None:
                last = max(last, number)
                kept += batch if number == seq else [(row[0], number, *row[2:]) for row in batch]
    return OrderedRows(tuple(kept), last, tuple(moved))
