"""A model of the log, for `interleaving.explore`: a writer, another that replaces it, and a collector.

The manifest is one step here, because its own protocol is checked elsewhere (`interleaving_models.py`). What is
asked is whether a row can be reported as durable and yet be where neither replay nor a table has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal, NamedTuple

from flagstone.testing.interleaving import Exploration, Operation, Process, explore

Precaution = Literal["fences stay", "look at the manifest", "look if too much time has passed", "none"]

FENCE: Final = ""


class Log(NamedTuple):
    """The log and the manifest. A file is (id, row, time of its creation); `done` rows were reported as durable."""

    files: tuple[tuple[int, str, int], ...] = ((1, FENCE, 0),)
    epoch: int = 1
    replay_after: int = 0
    in_tables: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    now: int = 0

    def row(self, wal_id: int) -> str | None:
        return next((row for number, row, _ in self.files if number == wal_id), None)


def check_log(log: Log) -> str | None:
    """Every row that was reported as durable is in the tables, or where replay finds it."""
    visible, wal_id = set(log.in_tables), log.replay_after + 1
    while (row := log.row(wal_id)) is not None:
        visible.add(row)
        wal_id += 1
    lost = log.done - visible
    return f"{', '.join(sorted(lost))} was reported as durable and is lost" if lost else None


def explore_log(
    precaution: Precaution,
    *,
    files: int = 2,
    openers: int = 1,
    rounds: int = 2,
    min_age: int = 0,
    trusted: int = 0,
    ticks: int = 0,
) -> Exploration:
    """A writer that writes `files`, `openers` that replace it in turn or at once, and a collector.

    Time matters only with `ticks` of it: fences are collected when they are `min_age` old, and a writer that looks only
    after too much time trusts a look for less than `trusted`.
    """
    looks: bool | int = {
        "fences stay": False,
        "none": False,
        "look at the manifest": True,
        "look if too much time has passed": trusted,
    }[precaution]
    processes = {"writer A": partial(_writer, "A", 1, 2, files, looks)}
    for name in "BC"[:openers]:
        processes[f"writer {name}"] = partial(_opener, name, looks)
    processes["collector"] = partial(_collector, rounds, precaution != "fences stay", min_age)
    if ticks:
        processes["time"] = partial(_time, ticks)
    return explore(Log(), processes, check_log)


def _writer(name: str, epoch: int, next_id: int, files: int, looks: bool | int) -> Process:
    """Write that many files; ends when it is fenced."""
    number, confirmed = 0, -1
    while number < files:
        row = f"{name}{number}"
        created = yield _put(next_id + number, row)
        if not created:
            return False
        if looks is not False:
            asked = yield _read_clock
            if looks is True or confirmed < 0 or asked - confirmed >= looks:
                found = yield _read_manifest
                if found[0] != epoch:
                    return False
                confirmed = asked
        yield _report(row)
        number += 1
    return True


def _opener(name: str, looks: bool | int) -> Process:
    """Take the database over, replay the log, write a file of its own, and flush everything into tables."""
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
    written = yield from _writer(name, epoch, candidate + 1, 1, looks)
    if written:
        yield _flush(epoch, candidate + 1, (*rows, f"{name}0"))


def _replay(epoch: int, fence: int) -> Process:
    """The rows up to the fence; None when somebody else has taken over."""
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


def _tick(log: Log) -> tuple[Log, None]:
    return log._replace(now=log.now + 1), None


def _read_clock(log: Log) -> tuple[Log, int]:
    return log, log.now


def _read_manifest(log: Log) -> tuple[Log, tuple[int, int]]:
    return log, (log.epoch, log.replay_after)


def _claim(log: Log) -> tuple[Log, tuple[int, int]]:
    return log._replace(epoch=log.epoch + 1), (log.epoch + 1, log.replay_after)


def _list_files(log: Log) -> tuple[Log, tuple[tuple[int, str, int, int], ...]]:
    return log, tuple((*file, log.now) for file in log.files)


def _exists(wal_id: int) -> Operation:
    return lambda log: (log, log.row(wal_id) is not None)


def _read_row(wal_id: int) -> Operation:
    return lambda log: (log, log.row(wal_id))


def _put(wal_id: int, row: str) -> Operation:
    def put_if_absent(log: Log) -> tuple[Log, bool]:
        if log.row(wal_id) is not None:
            return log, False
        return log._replace(files=tuple(sorted([*log.files, (wal_id, row, log.now)]))), True

    return put_if_absent


def _delete(wal_id: int) -> Operation:
    return lambda log: (log._replace(files=tuple(file for file in log.files if file[0] != wal_id)), None)


def _report(row: str) -> Operation:
    return lambda log: (log._replace(done=log.done | {row}), None)


def _flush(epoch: int, replay_after: int, rows: tuple[str, ...]) -> Operation:
    def commit_flush(log: Log) -> tuple[Log, Any]:
        if log.epoch != epoch:
            return log, None
        return log._replace(replay_after=replay_after, in_tables=log.in_tables | set(rows)), None

    return commit_flush
