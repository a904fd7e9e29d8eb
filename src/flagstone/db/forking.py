"""What becomes of an open database in a forked child: the threads stayed in the parent, so it is closed there."""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

from flagstone.errors import Closed


class Forsaken(Protocol):
    """Something that cannot go on in a child."""

    def abandon_in_child(self, reason: Closed) -> None: ...


_open: WeakSet[Forsaken] = WeakSet()


def abandon_in_children(opened: Forsaken) -> None:
    """From now on, a forked child calls `abandon_in_child` of `opened` before anything else."""
    _open.add(opened)


def renew_lock(lock: Any) -> None:
    """Free a lock in the child: a thread of the parent may have held it, and nobody here would release it."""
    renew = getattr(lock, "_at_fork_reinit", None)
    if renew is not None:
        renew()


def _after_fork_in_child() -> None:
    for opened in list(_open):
        opened.abandon_in_child(
            Closed(
                "this database was opened before the process forked, and its background work stayed in the "
                "parent; open it again in the child",
                reason="failed",
            )
        )


os.register_at_fork(after_in_child=_after_fork_in_child)
