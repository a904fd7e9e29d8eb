"""A model of the WAL: a writer, a second writer that replaces it, and a collector.

A change of the manifest is one step here, because `manifest_model.py` checks its protocol. The model asks whether a
row can be reported as durable and yet be neither in a WAL file that replay reads nor in an SST.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal, NamedTuple

from interleaving.explorer import Exploration, Operation, Process, explore

Precaution = Literal["fences stay", "read the manifest", "read the manifest after a while", "none"]

FENCE: Final = ""


class Wal(NamedTuple):
    """The WAL and the manifest. A file is (id, row, time of its creation); `done` rows were reported as durable."""

    files: tuple[tuple[int, str, int], ...] = ((1, FENCE, 0),)
    epoch: int = 1
    replay_after: int = 0
    in_ssts: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    now: int = 0

    def row(self, wal_id: int) -> str | None:
        return next((row for number, row, _ in self.files if number == wal_id), None)


def check_wal(wal: Wal) -> str | None:
    """Every row that was reported as durable is in an SST, or in a WAL file that replay reads."""
    visible, wal_id = set(wal.in_ssts), wal.replay_after + 1
    while (row := wal.row(wal_id)) is not None:
        visible.add(row)
        wal_id += 1
    lost = wal.done - visible
    return f"{', '.join(sorted(lost))} was reported as durable and is lost" if lost else None


def explore_wal(
    precaution: Precaution,
    *,
    files: int = 2,
    openers: int = 1,
    rounds: int = 2,
    min_age: int = 0,
    trusted: int = 0,
    ticks: int = 0,
) -> Exploration:
    """A writer that writes `files`, `openers` that replace it one after the other or at once, and a collector.

    Time passes only with `ticks`: fences are collected when they are `min_age` old, and a writer that reads the
    manifest after a while trusts what it read for less than `trusted`.
    """
    rereads: bool | int = {
        "fences stay": False,
        "none": False,
        "read the manifest": True,
        "read the manifest after a while": trusted,
    }[precaution]
    processes = {"writer A": partial(_writer, "A", 1, 2, files, rereads)}
    for name in "BC"[:openers]:
        processes[f"writer {name}"] = partial(_opener, name, rereads)
    processes["collector"] = partial(_collector, rounds, precaution != "fences stay", min_age)
    if ticks:
        processes["time"] = partial(_time, ticks)
    return explore(Wal(), processes, check_wal)


def _writer(name: str, epoch: int, next_id: int, files: int, rereads: bool | int) -> Process:
    """Write that many WAL files; end when fenced. Whether all were written."""
    number, confirmed = 0, -1
    while number < files:
        row = f"{name}{number}"
        created = yield _put(next_id + number, row)
        if not created:
            return False
        if rereads is not False:
            asked = yield _read_clock
            if rereads is True or confirmed < 0 or asked - confirmed >= rereads:
                found = yield _read_manifest
                if found[0] != epoch:
                    return False
                confirmed = asked
        yield _report(row)
        number += 1
    return True


def _opener(name: str, rereads: bool | int) -> Process:
    """Claim the database, replay the WAL, write one WAL file, and flush all rows to L0."""
    epoch, replay_after = yield _read_manifest
    candidate = replay_after + 1
    while (yield _exists(candidate)):
        candidate += 1
    epoch, replay_after = yield _claim
    while True:
        if candidate <= replay_after:
            candidate = replay_after + 1
            while (yield _exists(candidate)):
                candidate += 1
        fenced = yield _put(candidate, FENCE)
        if fenced:
            break
        found, replay_after = yield _read_manifest
        if found != epoch:
            return
        candidate += 1
    rows = yield from _replay(epoch, candidate)
    if rows is None:
        return
    written = yield from _writer(name, epoch, candidate + 1, 1, rereads)
    if written:
        yield _flush(epoch, candidate + 1, (*rows, f"{name}0"))


def _replay(epoch: int, fence: int) -> Process:
    """The rows up to the fence; None if another writer has claimed the database."""
    attempts = 0
    while attempts < 3:
        attempts += 1
        found, wal_id = yield _read_manifest
        if found != epoch:
            return None
        rows: tuple[str, ...] = ()
        while wal_id < fence:
            wal_id += 1
            row = yield _read_row(wal_id)
            if row is None:
                break
            rows = (*rows, row)
        else:
            return rows
    return None


def _collector(rounds: int, fences_too: bool, min_age: int) -> Process:
    number = 0
    while number < rounds:
        number += 1
        listed = yield _list_files
        _, replay_after = yield _read_manifest
        left = tuple(
            wal_id
            for wal_id, row, born, now in listed
            if wal_id < replay_after and (row != FENCE or (fences_too and now - born >= min_age))
        )
        while left:
            yield _delete(left[0])
            left = left[1:]


def _time(ticks: int) -> Process:
    number = 0
    while number < ticks:
        yield _tick
        number += 1


def _tick(wal: Wal) -> tuple[Wal, None]:
    return wal._replace(now=wal.now + 1), None


def _read_clock(wal: Wal) -> tuple[Wal, int]:
    return wal, wal.now


def _read_manifest(wal: Wal) -> tuple[Wal, tuple[int, int]]:
    return wal, (wal.epoch, wal.replay_after)


def _claim(wal: Wal) -> tuple[Wal, tuple[int, int]]:
    return wal._replace(epoch=wal.epoch + 1), (wal.epoch + 1, wal.replay_after)


def _list_files(wal: Wal) -> tuple[Wal, tuple[tuple[int, str, int, int], ...]]:
    return wal, tuple((*file, wal.now) for file in wal.files)


def _exists(wal_id: int) -> Operation:
    return lambda wal: (wal, wal.row(wal_id) is not None)


def _read_row(wal_id: int) -> Operation:
    return lambda wal: (wal, wal.row(wal_id))


def _put(wal_id: int, row: str) -> Operation:
    def put_if_absent(wal: Wal) -> tuple[Wal, bool]:
        if wal.row(wal_id) is not None:
            return wal, False
        return wal._replace(files=tuple(sorted([*wal.files, (wal_id, row, wal.now)]))), True

    return put_if_absent


def _delete(wal_id: int) -> Operation:
    return lambda wal: (wal._replace(files=tuple(file for file in wal.files if file[0] != wal_id)), None)


def _report(row: str) -> Operation:
    return lambda wal: (wal._replace(done=wal.done | {row}), None)


def _flush(epoch: int, replay_after: int, rows: tuple[str, ...]) -> Operation:
    def commit_flush(wal: Wal) -> tuple[Wal, Any]:
        if wal.epoch != epoch:
            return wal, None
        return wal._replace(replay_after=replay_after, in_ssts=wal.in_ssts | set(rows)), None

    return commit_flush
