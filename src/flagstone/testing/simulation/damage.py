"""Damage: stored objects with a flipped byte or a missing end, and answers that are damaged on their way.

At the end of a world the database is sound and nothing else runs. Then one object at a time is damaged. Every read
gives the right rows or raises `CorruptData` with the name of an object, and `verify` reports the object. When the bytes
are back, every row is there: no process has made the damage permanent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flagstone.errors import CorruptData, FlagstoneError
from flagstone.store.port import Range, StoredObject
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.network import Link
from flagstone.testing.simulation.oracle import Violation
from flagstone.testing.simulation.readers import require_same, rows_of, values_of
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.wal.frontier import VOID

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

_TRIALS: Final = 8
_DAMAGED_ANSWERS: Final = 0.1


def require_reported(world: World, process: Process) -> None:
    """Damage objects one by one, and require that no read shows wrong rows."""
    found, _ = rows_of(world, process, MAIN_PATH)
    rows = values_of(found)
    for _ in range(_TRIALS):
        store = world.random.choice((world.store, world.wal_store))
        # A void WAL file that lost its bytes is a fence, which loses nothing.
        paths = [
            meta.path for meta in store.list(MAIN_PATH) if _holds_data(meta.path) and meta.size > len(VOID)
        ]
        if not paths:
            continue
        path = world.random.choice(paths)
        whole = store.get(path).data
        store.put(path, damaged(world, whole))
        world.scheduler.note(f"damage {path}")
        world.done["damage"] += 1
        _require_rows_or_error(world, process, rows, path)
        _require_finding(world, process, path)
        store.put(path, whole)
        found, _ = rows_of(world, process, MAIN_PATH)
        require_same("the mended database", values_of(found), rows)
    _require_safe_answers(world, process, rows)


def damaged(world: World, data: bytes) -> bytes:
    """The data with one flipped bit, or without its end."""
    random = world.random
    at = random.randrange(len(data))
    if random.random() < 0.3:
        return data[:at]
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _holds_data(path: str) -> bool:
    return any(f"/{folder}/" in path for folder in ("compacted", "wal", "manifest"))


def _require_rows_or_error(world: World, process: Process, rows: dict[bytes, bytes], path: str) -> None:
    try:
        found, _ = rows_of(world, process, MAIN_PATH)
    except FlagstoneError as error:
        _require_named(error, path)
    else:
        require_same(f"the database with a damaged {path}", values_of(found), rows)


def _require_named(error: FlagstoneError, path: str) -> None:
    if not isinstance(error, CorruptData) or error.object is None:
        raise Violation(f"a read of the damaged {path} raised {describe(error)}")


def _require_finding(world: World, process: Process, path: str) -> None:
    try:
        report = world.admin(process).verify()
    except FlagstoneError as error:
        _require_named(error, path)
        return
    if not any(finding.object == path and finding.severity != "note" for finding in report.findings):
        shown = [str(finding) for finding in report.findings[:2]]
        raise Violation(f"verify does not report the damaged {path}: {shown}")


def _require_safe_answers(world: World, process: Process, rows: dict[bytes, bytes]) -> None:
    """Reads over a network that damages answers now and then."""
    for _ in range(_TRIALS):
        stores = {**world.stores(process), "store": _NoisyLink(world, process)}
        try:
            with (
                world.open_reader(process, mode="latest", **stores) as reader,
                reader.scan(include_expired=True) as shown,
            ):
                found = list(shown.rows())
        except CorruptData as error:
            _require_named(error, "answer")
        else:
            require_same("a reader with damaged answers", values_of(found), rows)
        world.done["noisy read"] += 1


class _NoisyLink(Link):
    """A link that damages some answers."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world.network, process)
        self._world = world

    def get(self, path: str) -> StoredObject:
        return self._damage_object(super().get(path))

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._damage_object(super().get_tail(path, length))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._damage(super().get_range(path, start, stop))

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        return [self._damage(data) for data in super().get_ranges(path, ranges)]

    def _damage_object(self, stored: StoredObject) -> StoredObject:
        return replace(stored, data=self._damage(stored.data))

    def _damage(self, data: bytes) -> bytes:
        hit = data and self._world.random.random() < _DAMAGED_ANSWERS
        return damaged(self._world, bytes(data)) if hit else data
