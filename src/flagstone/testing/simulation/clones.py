"""Clones of the database: whole ones, of checkpoints, and of a key range. They come, are written to, and go.

A clone shows the rows of its source at one moment, whatever happens to the source afterwards. When a writer has opened
a clone, the clone has a history of its own. A destroyed clone leaves nothing behind, and releases what it borrowed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

from flagstone.errors import Closed, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.metadata.stores import NoDatabase
from flagstone.store.paths import DbPaths
from flagstone.testing.simulation.databases import Concatenation, TrackedDatabase
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.operators import require_no_damage
from flagstone.testing.simulation.plan import GARBAGE_AGE
from flagstone.testing.simulation.readers import require_same, reread, rows_of, values_of
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.testing.simulation.session import Session
from flagstone.types import Row

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

_AT_ONCE: Final = 3
"""How many clones a world has at one time."""


@dataclass(slots=True, eq=False)
class Clone:
    """A clone, from the first call that makes it."""

    database: TrackedDatabase
    checkpoint: UUID | None
    source_rows: dict[bytes, bytes] | None
    """The rows of the checkpoint that is cloned."""
    keys: tuple[bytes | None, bytes | None] | None
    rows: list[Row] = field(default_factory=list)
    """What the finished clone showed at first."""
    finished: bool = False
    written: bool = False

    @property
    def path(self) -> str:
        return self.database.path

    @property
    def first_key(self) -> bytes:
        """A key that the clone has or can have."""
        return (self.keys or (None, None))[0] or b"judge"

    def holds(self, key: bytes) -> bool:
        start, stop = self.keys or (None, None)
        return (start is None or key >= start) and (stop is None or key < stop)


class Clones:
    """All clones of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        self._made = 0
        self.alive: list[Clone] = []

    # -- the processes ------------------------------------------------------------------------------------

    def write(self, process: Process) -> None:
        """Open a clone for writing, if there is one."""
        world = self._world
        ready = [each for each in self.alive if each.finished]
        if not ready:
            return
        clone = self._random.choice(ready)
        clone.written = True
        try:
            world.use(process, clone.database, holds=clone.holds if clone.keys is not None else None)
            world.done["clone write"] += 1
            world.done["projection write"] += clone.keys is not None
        except (Closed, Unavailable, InvalidRequest, CorruptData) as error:
            if isinstance(error, InvalidRequest) and not clone.database.destroyed:
                raise
            if isinstance(error, CorruptData) and world.is_unexpected(error):
                raise
            world.scheduler.note(f"clone writer: {describe(error)}")

    def manage(self, process: Process) -> None:
        """Make a clone, look at one, compact one or destroy one."""
        choice = self._random.randrange(4)
        if choice == 0 or not self.alive:
            if len(self.alive) < _AT_ONCE:
                self._begin(process)
            return
        clone = self._random.choice(self.alive)
        if clone.database.destroyed or self._random.random() < 0.2:
            self._destroy(process, clone, soft=self._random.random() < 0.4)
        elif not clone.finished:
            self._make(process, clone)
        elif choice == 1:
            self._check(process, clone)
        elif choice == 2:
            admin = self._world.admin(process, clone.path)
            admin.compact(full=True, merge_operator=Concatenation())
            admin.collect_garbage(min_age=GARBAGE_AGE)
            self._world.done["clone compact"] += 1
        else:
            require_no_damage(self._world, self._world.admin(process, clone.path))

    # -- making -------------------------------------------------------------------------------------------

    def _begin(self, process: Process) -> None:
        random, checkpoints = self._random, self._world.main.checkpoints
        checkpoint = random.choice(list(checkpoints)) if checkpoints and random.random() < 0.5 else None
        keys = random.choice((None, None, (None, b"k003"), (b"k002", b"m001"), (b"m", None)))
        self._made += 1
        clone = Clone(
            TrackedDatabase(f"clone{self._made}"),
            checkpoint,
            None if checkpoint is None else checkpoints[checkpoint],
            keys,
        )
        self.alive.append(clone)
        self._make(process, clone)

    def _make(self, process: Process, clone: Clone) -> None:
        """Make the clone, or finish it, and compare it with its source."""
        world = self._world
        try:
            world.admin(process).clone(clone.path, checkpoint=clone.checkpoint, range=clone.keys)
        except InvalidRequest as error:
            if "a finished clone at" in str(error) or "there is a database at" in str(error):
                pass  # an earlier call has made it, and its reply was lost
            elif self._refused(clone, str(error)):
                world.scheduler.note(f"clone: {describe(error)}")
                clone.database.destroyed = True
                self._destroy(process, clone, soft=False)
                return
            else:
                raise
        self._note_finished(process, clone)
        world.done["clone"] += 1

    def _refused(self, clone: Clone, text: str) -> bool:
        """Whether the call may be refused: its checkpoint is gone, or its WAL holds rows of the range."""
        gone = clone.checkpoint is not None and clone.checkpoint not in self._world.main.checkpoints
        return (
            gone
            or "no database" in text
            or "expired" in text
            or "gone" in text
            or (clone.keys is not None and "flush" in text)
        )

    def _note_finished(self, process: Process, clone: Clone) -> None:
        world, main = self._world, self._world.main
        before_ms = process.machine.now_ms()
        rows, seq = rows_of(world, process, clone.path)
        if clone.source_rows is not None:
            wanted = {key: value for key, value in clone.source_rows.items() if clone.holds(key)}
            require_same(f"{clone.path} of a checkpoint", values_of(rows), wanted)
        else:
            with world.open_reader(process, clone.path, mode="latest") as reader:
                shown = dict(reader.scan(*(clone.keys or ())))
            branch = main.oracle.latest
            window = world.window(before_ms, process.machine)
            for key in sorted(key for key in {*shown, *main.oracle.keys()} if clone.holds(key)):
                if branch is None:
                    raise Violation(f"{clone.path} has {key!r} before anything was written")
                main.oracle.expect(branch, key, shown.get(key), (seq, seq), window)
        clone.rows = rows
        clone.database.oracle.start_with(rows, seq)
        clone.finished = True

    # -- checking -----------------------------------------------------------------------------------------

    def _check(self, process: Process, clone: Clone) -> None:
        if clone.written:
            return
        rows, _ = rows_of(self._world, process, clone.path)
        if not clone.written:
            # A compaction of the clone drops rows that have expired.
            _, now_ms = self._world.window(0, process.machine)
            shown = values_of(rows)
            wanted = [
                row
                for row in clone.rows
                if row.key in shown or row.expires_ms is None or row.expires_ms > now_ms
            ]
            require_same(clone.path, shown, values_of(wanted))
            self._world.done["clone reread"] += 1

    # -- destroying ---------------------------------------------------------------------------------------

    def _destroy(self, process: Process, clone: Clone, *, soft: bool) -> bool:
        """Destroy the clone, or continue to; True when nothing of it is left."""
        world = self._world
        clone.database.destroyed = True
        try:
            world.admin(process, clone.path).destroy(soft=soft, grace="60s")
            world.done["destroy"] += 1
        except InvalidRequest as error:
            if "no database" in str(error):
                self.alive = [each for each in self.alive if each is not clone]
                return True
            if "checkpoint" not in str(error):
                raise
            world.scheduler.note(f"destroy: {describe(error)}")
        return False

    # -- the end ------------------------------------------------------------------------------------------

    def require_sound(self, process: Process) -> None:
        """In the quiet time: every clone shows what it must show, and then goes without a trace."""
        world = self._world
        for clone in list(self.alive):
            if not clone.database.destroyed and not clone.finished:
                self._make(process, clone)
            if clone.database.destroyed:
                continue
            if clone.written:
                with world.open(process, clone.path) as db:
                    session = Session(world, clone.database, process, db)
                    session.put_durably(clone.first_key)
                    session.scan()
            else:
                self._check(process, clone)
            admin = world.admin(process, clone.path)
            require_no_damage(world, admin)
            for checkpoint in clone.database.checkpoints:
                reread(world, process, clone.database, checkpoint)
            clone.database.destroyed = True

    def require_gone(self, process: Process) -> None:
        """After every checkpoint has expired: the clones can be deleted whole."""
        world = self._world
        for clone in list(self.alive):
            admin = world.admin(process, clone.path)
            with suppress(NoDatabase):
                for checkpoint in admin.checkpoints():
                    admin.delete_checkpoint(checkpoint.id, force=True)
            if not any(self._destroy(process, clone, soft=False) for _ in range(5)):
                raise Violation(f"{clone.path} cannot be destroyed")
        for number in range(1, self._made + 1):
            path = f"clone{number}"
            with suppress(NoDatabase):
                world.admin(process, path).purge(min_age="0s")
            left = self._left(process, path)
            if left == [DbPaths(path).own("origin")]:
                # A late request has begun the clone again after its destruction.
                world.admin(process, path).destroy()
                left = self._left(process, path)
            if left:
                raise Violation(f"left over after the destruction of {path}: {left[0]}")

    def _left(self, process: Process, path: str) -> list[str]:
        return [meta.path for store in self._world.stores(process).values() for meta in store.list(path)]


def manage_clones(world: World, process: Process) -> None:
    """The life of a process that makes clones, looks at them and destroys them."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / (5 * world.plan.idle_s)))
        try:
            world.clones.manage(process)
        except (Closed, Unavailable, TransactionConflict, CorruptData) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"clones: {describe(error)}")


def write_to_clones(world: World, process: Process) -> None:
    """The life of a process that opens clones for writing, one after the other."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / world.plan.idle_s))
        world.clones.write(process)
