"""Damage: stored objects with a flipped byte or a missing end, and answers that are damaged on their way.

In the troubled time the director damages objects for a while (`director.py`). Every process may get `CorruptData`,
which names an object that was damaged, and every row that it reads is right. At the end the bytes are back, and the
database must be sound: no process has made the damage permanent.

Then, while nothing else runs, one object at a time is damaged. Every read gives the right rows or raises `CorruptData`
with the name of an object, and `verify` reports the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flagstone.errors import CorruptData, FlagstoneError
from flagstone.store.paths import DbPaths
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.readers import require_same, rows_of, values_of
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.testing.simulation.stores import NoisyLink, damaged
from flagstone.wal.frontier import VOID

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

_TRIALS: Final = 8


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
        hurt = damaged(world.random, store.get(path).data)
        store.damage(path, hurt)
        world.scheduler.note(f"damage {path}")
        world.done["damage"] += 1
        _require_rows_or_error(world, process, rows, path)
        if hurt or not _is_flushed_wal(world, process, path):
            _require_finding(world, process, path)
        store.mend()
        found, _ = rows_of(world, process, MAIN_PATH)
        require_same("the mended database", values_of(found), rows)
    _require_safe_answers(world, process, rows)


def _holds_data(path: str) -> bool:
    return any(f"/{folder}/" in path for folder in ("compacted", "wal", "manifest"))


def _is_flushed_wal(world: World, process: Process, path: str) -> bool:
    """Whether it is a WAL file whose rows are all in SSTs. If it is empty, it may as well have been a fence."""
    wal_id = DbPaths(MAIN_PATH).parse_wal(path)
    return wal_id is not None and wal_id <= world.admin(process).manifest().value.replay_after_wal_id


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
        stores = {**world.stores(process), "store": NoisyLink(world.network, process, world.store)}
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
