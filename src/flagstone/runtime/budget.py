"""One memory budget for all databases that this process has open.

The components that ask, and what happens if there is no room:

    rows in memtables   `RowAccount.ask`, in steps; the writers of that database wait
    a flush             `MemoryBudget.flushing`, from a reserved part; the flush waits for other flushes only
    a merge             `MemoryBudget.merging`, from a reserved part; the merge waits for other merges only
    the block cache     takes what the others leave, and shrinks when they ask for more

No thread waits for memory while it holds some, and flushes and merges have parts of their own. So memory that waiting
writers need always becomes free: if no flush is under way, the budget freezes the largest memtables.

The lock here is a leaf: no other lock is taken while it is held. `ask` may be called under the write lock of a
database. Everything that takes such a lock (`retry`, `freeze`) is called without any.

What a thread holds is an object, not a number: if an exception ends the thread at any point, the object goes, and the
memory counts as free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakSet

from flagstone.config import Settings
from flagstone.errors import InvalidRequest
from flagstone.runtime.pool import IoPool
from flagstone.runtime.sync import Lock, Waiters, of_process

_RETRY_S: Final = 1.0
_THREADS: Final = 4


class Shares(NamedTuple):
    """The parts of a budget. `step` is how much memory a memtable gets at a time."""

    rows: int
    flush: int
    merge: int
    largest_memtable: int
    step: int


def plan_shares(total_bytes: int) -> Shares:
    """A quarter for rows: their index takes another quarter of that, and a WAL file may hold all of them once more."""
    return Shares(
        rows=total_bytes // 4,
        flush=total_bytes // 8,
        merge=total_bytes // 8,
        largest_memtable=total_bytes // 16,
        step=total_bytes // 1024,
    )


def plan_cache_bytes(total_bytes: int, *, rows: int, merging: int) -> int:
    """What the block cache may hold: what the others leave, without the part of flushes; at least a sixteenth."""
    return max(total_bytes - plan_shares(total_bytes).flush - rows * 9 // 4 - merging, total_bytes // 16)


def plan_freezes(active: Sequence[int], frozen_bytes: int, *, wanted_bytes: int) -> list[int]:
    """Which active memtables to freeze, largest first, so that `wanted_bytes` are frozen in all."""
    chosen = []
    for index in sorted(range(len(active)), key=lambda index: -active[index]):
        if frozen_bytes >= wanted_bytes or not active[index]:
            break
        chosen.append(index)
        frozen_bytes += active[index]
    return chosen


def fit_settings(settings: Settings, shares: Shares) -> Settings:
    """The settings, with limits that are not larger than their share."""
    compactor = settings.compactor_options
    if compactor is not None and compactor.worker is not None:
        worker = compactor.worker.replace(
            max_sst_size=min(compactor.worker.max_sst_size, shares.merge // 4),
            bytes_to_fetch=min(compactor.worker.bytes_to_fetch, shares.merge // 64),
        )
        compactor = compactor.replace(worker=worker)
    wal = shares.rows // 8
    return settings.replace(
        l0_sst_size_bytes=min(settings.l0_sst_size_bytes, shares.largest_memtable),
        max_unflushed_bytes=min(settings.max_unflushed_bytes, shares.rows),
        max_wal_bytes=wal if settings.max_wal_bytes is None else min(settings.max_wal_bytes, wal),
        compactor_options=compactor,
    )


class Reclaimable(Protocol):
    """A cache whose memory can be taken away."""

    def resize(self, capacity_bytes: int) -> None:
        """Keep at most this much from now on."""
        ...


C = TypeVar("C", bound=Reclaimable)


class RowHolder(Protocol):
    """A database with memtables."""

    def memtable_bytes(self) -> tuple[int, int]:
        """The bytes in the active memtable and in the frozen ones."""
        ...

    def freeze(self) -> bool:
        """Begin a new memtable, so that the present one is flushed."""
        ...

    def retry(self) -> None:
        """Memory was released: ask again."""
        ...


class RowAccount:
    """The memory for the rows of one open database. `starved` while it was refused more."""

    __slots__ = ("__weakref__", "_budget", "held", "holder", "starved")

    def __init__(self, budget: MemoryBudget, holder: RowHolder) -> None:
        self._budget = budget
        self.holder: Final = holder
        self.held: int = 0
        self.starved: bool = False

    def ask(self, used_bytes: int) -> tuple[bool, int]:
        """The rows take `used_bytes` now: whether they may take more, and how much before the next call. Never waits.

        A database without rows gets nothing: its first write asks.
        """
        return self._budget.ask_rows(self, used_bytes)

    def relieve(self) -> None:
        """Make memory free for a writer that waits. The caller holds no lock."""
        self._budget.relieve()

    def settle(self) -> None:
        """After rows were released: let starved databases ask again. The caller holds no lock."""
        self._budget.settle()

    def close(self) -> None:
        """Release everything. The caller holds no lock."""
        self.held = 0
        self._budget.remove(self)


class _Grant:
    """Memory for one flush or merge, as long as the object exists."""

    __slots__ = ("__weakref__", "size")

    def __init__(self, size: int) -> None:
        self.size = size


class MemoryBudget:
    """See the module. Safe to use from many threads."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes: Final = total_bytes
        self.shares: Final = plan_shares(total_bytes)
        self._lock = Lock()
        self._changed = Waiters(self._lock)
        self._accounts: WeakSet[RowAccount] = WeakSet()
        self._flushes: WeakSet[_Grant] = WeakSet()
        self._merges: WeakSet[_Grant] = WeakSet()
        self._cache: Reclaimable | None = None
        self.flush_pool: Final = IoPool(max_workers=_THREADS, name="flagstone-flush")
        """The threads that flush the memtables of all databases."""
        self.merge_pool: Final = IoPool(max_workers=_THREADS, name="flagstone-merge")
        """The threads that merge ranges of compactions of all databases."""

    @property
    def used(self) -> bool:
        """Whether a database is open that draws from it."""
        return len(self._accounts) > 0

    def open_account(self, holder: RowHolder) -> RowAccount:
        """An account for the rows of one database."""
        account = RowAccount(self, holder)
        with self._lock:
            self._accounts.add(account)
        return account

    def share_cache(self, own: C) -> C:
        """The cache that all databases of the budget share: the first one that was given."""
        with self._lock:
            if self._cache is None:
                self._cache = own
            shared = self._cache
        self._fit_cache()
        return cast("C", shared)

    def remove(self, account: RowAccount) -> None:
        """The database of this account was closed."""
        with self._lock:
            self._accounts.discard(account)
        self.settle()

    def ask_rows(self, account: RowAccount, used_bytes: int) -> tuple[bool, int]:
        """See `RowAccount.ask`."""
        step = self.shares.step if used_bytes else 0
        with self._lock:
            others = sum(other.held for other in self._accounts if other is not account)
            starved = used_bytes > 0 and others + used_bytes + step > self.shares.rows
            account.starved = starved
            account.held = used_bytes if starved else used_bytes + step
        self._fit_cache()
        return not starved, step

    def settle(self) -> None:
        """Let starved databases ask again, and freeze memtables if one is still starved."""
        with self._lock:
            starved = [account for account in self._accounts if account.starved]
        for account in starved:
            account.holder.retry()
        if any(account.starved for account in starved):
            self.relieve()

    def relieve(self) -> None:
        """Freeze the largest memtables, unless enough of them wait for their flush already."""
        with self._lock:
            accounts = list(self._accounts)
        sizes = [account.holder.memtable_bytes() for account in accounts]
        frozen = sum(size for _, size in sizes)
        for index in plan_freezes(
            [active for active, _ in sizes], frozen, wanted_bytes=self.shares.rows // 4
        ):
            accounts[index].holder.freeze()

    @contextmanager
    def flushing(self, size: int) -> Iterator[None]:
        """Memory for the flush of `size` bytes of rows. Waits for other flushes; one that is alone never waits."""
        grant = self._take(self._flushes, size, self.shares.flush)
        try:
            yield
        finally:
            self._give_back(self._flushes, grant)

    @contextmanager
    def merging(self, size: int, check: Callable[[], object]) -> Iterator[None]:
        """Memory for one merge. Waits for other merges; one that is alone never waits.

        While it waits it calls `check`, which raises to end the wait.
        """
        grant = self._take(self._merges, size, self.shares.merge, check)
        try:
            self._fit_cache()
            yield
        finally:
            self._give_back(self._merges, grant)
            self._fit_cache()

    def usage(self) -> dict[str, int]:
        """What is in use now, in bytes."""
        with self._lock:
            return {
                "budget": self.total_bytes,
                "rows": sum(account.held for account in self._accounts),
                "flushes": _sum(self._flushes),
                "merges": _sum(self._merges),
            }

    def _take(
        self,
        grants: WeakSet[_Grant],
        size: int,
        limit: int,
        check: Callable[[], object] = lambda: None,
    ) -> _Grant:
        grant = _Grant(size)

        def granted() -> bool:
            # One that is alone gets what it needs, so that it always makes progress.
            fits = not len(grants) or _sum(grants) + size <= limit
            if fits:
                grants.add(grant)
            return fits

        # With a limit: a grant that an exception dropped wakes no thread.
        while not self._changed.wait_for(granted, timeout=_RETRY_S):
            check()
        return grant

    def _give_back(self, grants: WeakSet[_Grant], grant: _Grant) -> None:
        with self._lock:
            self._changed.notify_all()
            grants.discard(grant)

    def _fit_cache(self) -> None:
        cache = self._cache
        if cache is None:
            return
        with self._lock:
            rows, merging = sum(account.held for account in self._accounts), _sum(self._merges)
        cache.resize(plan_cache_bytes(self.total_bytes, rows=rows, merging=merging))


def _sum(grants: WeakSet[_Grant]) -> int:
    return sum(grant.size for grant in grants)


class _Process:
    """The budget that the databases of this process share, if they have one."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.budget: MemoryBudget | None = None


def process_budget(total_bytes: int) -> MemoryBudget:
    """The budget that all open databases with the setting `memory_budget` share.

    Raises `InvalidRequest` if open databases share a budget of another size.
    """
    process = of_process(_Process) or _process
    with process.lock:
        held = process.budget
        if held is None or (held.total_bytes != total_bytes and not held.used):
            held = process.budget = MemoryBudget(total_bytes)
        if held.total_bytes != total_bytes:
            raise InvalidRequest(
                f"memory_budget is {total_bytes}, but the databases that this process has open share one of "
                f"{held.total_bytes}; use the same for all, or close them first"
            )
        return held


_process = _Process()


def _after_fork_in_child() -> None:
    global _process  # noqa: PLW0603
    _process = _Process()


os.register_at_fork(after_in_child=_after_fork_in_child)
