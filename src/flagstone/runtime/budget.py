"""One memory budget for all databases and readers that this process has open.

The components that ask, and what happens if there is no room:

    an open database    a fixed amount each; the parts of all others shrink
    rows in memtables   `RowAccount.ask`, in steps; the writers of that database wait
    a flush             `MemoryBudget.flushing`, from a reserved part; the flush waits for other flushes only
    a merge             `MemoryBudget.merging`, from a reserved part; the merge waits for other merges only
    read-ahead          `MemoryBudget.read_ahead`, a reserved part; a scan reads less ahead
    uploaded SSTs       `MemoryBudget.fresh`, a reserved part; the first read of an SST fetches its index
    rows of a reader    `ReaderAccount.hold`; nothing: a reader can neither wait nor drop rows that its reads need
    the block cache     takes what the others have left so far, and shrinks when they ask for more

No thread waits for memory while it holds some, and every part is reserved, so that no component waits for another kind.
The memory that waiting writers need always becomes free: if no flush is under way, the budget freezes the largest
memtables. A flush or merge that is alone runs whatever its size. A scan fetches what it needs next without asking.
Every wait ends at a notification, and flushes and merges test again after a second.

The locks here are leaves: no other lock is taken while one is held. `ask` may be called under the write lock of a
database. Everything that takes such a lock (`retry`, `freeze`) is called without any.

What a thread holds is an object (`runtime.grants`): if an exception ends the thread at any point, the memory counts as
free. Freed memory goes back to the system (`runtime.allocator`), or the budget would bound only what is in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakSet

from flagstone.config import Settings
from flagstone.errors import InvalidRequest
from flagstone.runtime import allocator
from flagstone.runtime.grants import Grant, MemoryPart
from flagstone.runtime.pool import IoPool
from flagstone.runtime.sync import Lock, of_process

_THREADS: Final = 4

ENGINE_BYTES: Final = 8 * 1024 * 1024
"""What the first open database takes: code that is read when it is used, threads of the pools and their buffers."""

DATABASE_BYTES: Final = 768 * 1024
"""What an open database without rows takes: its threads, the buffers of its WAL writer, metrics, open SSTs."""

_FIRST_STEP_BYTES: Final = 16 * 1024
"""What the first rows of a memtable get; it is the size of its first chunk."""


class Shares(NamedTuple):
    """The parts of a budget. `step` is how much memory a memtable gets at a time, at most."""

    rows: int
    flush: int
    merge: int
    read_ahead: int
    fresh: int
    least_cache: int
    largest_memtable: int
    step: int


def plan_shares(total_bytes: int, *, databases: int = 0) -> Shares:
    """The parts of what open databases leave; they leave at least a quarter.

    A quarter is for rows: their index takes another quarter of that, and WAL files may hold all of them once more.
    """
    left = max(total_bytes - ENGINE_BYTES - databases * DATABASE_BYTES, total_bytes // 4)
    return Shares(
        rows=left // 4,
        flush=left // 8,
        merge=left // 8,
        read_ahead=left // 16,
        fresh=left // 32,
        least_cache=left // 16,
        largest_memtable=left // 16,
        step=left // 1024,
    )


def plan_step(shares: Shares, used_bytes: int) -> int:
    """How much more a memtable gets: half of what its database has, so that small ones hold little in advance."""
    return 0 if not used_bytes else min(max(used_bytes // 2, _FIRST_STEP_BYTES), shares.step)


def plan_cache_bytes(shares: Shares, *, used: int) -> int:
    """What the block cache may hold if rows, merges and readers use so much: the rest without the reserved parts.

    It changes in steps of a sixteenth, because a cache that shrinks starts empty. An eighth of it is for what the cache
    does not count: its entries, and indexes that are larger than stored.
    """
    left = 8 * shares.flush - shares.flush - shares.read_ahead - shares.fresh
    steps = -(-used // shares.least_cache)
    return max((left - steps * shares.least_cache) * 7 // 8, shares.least_cache)


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

    def resize(self, capacity_bytes: int) -> int:
        """Keep at most this much from now on; returns how many bytes were released for that."""
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


class ReaderAccount:
    """The memory of one open reader: its memtables, which have the rows of the WAL that are in no SST."""

    __slots__ = ("__weakref__", "_budget", "held")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.held: int = 0

    def hold(self, size: int) -> None:
        """The memtables have `size` bytes now. Never refused: the cache shrinks."""
        self.held = size * 5 // 4
        self._budget.fit_cache()

    def close(self) -> None:
        """Release everything."""
        self.held = 0
        self._budget.remove(self)


class MemoryBudget:
    """See the module. Safe to use from many threads."""

    def __init__(self, total_bytes: int) -> None:
        allocator.bound(total_bytes)
        self.total_bytes: Final = total_bytes
        self.shares: Shares = plan_shares(total_bytes)
        self._lock = Lock()
        self._accounts: WeakSet[RowAccount] = WeakSet()
        self._readers: WeakSet[ReaderAccount] = WeakSet()
        self._flushes: Final = MemoryPart(self.shares.flush)
        self._merges: Final = MemoryPart(self.shares.merge)
        self.read_ahead: Final = MemoryPart(self.shares.read_ahead)
        """What all scans fetch before they need it."""
        self.fresh: Final = MemoryPart(self.shares.fresh)
        """Indexes and filters of uploaded SSTs, kept for their first read."""
        self._freed_bytes = 0
        self._most_used = 0
        self._cache: Reclaimable | None = None
        self.flush_pool: Final = IoPool(max_workers=_THREADS, name="flagstone-flush")
        """The threads that flush the memtables of all databases."""
        self.merge_pool: Final = IoPool(max_workers=_THREADS, name="flagstone-merge")
        """The threads that merge ranges of compactions of all databases."""

    @property
    def used(self) -> bool:
        """Whether a database or reader is open that draws from it."""
        return len(self._accounts) + len(self._readers) > 0

    def open_account(self, holder: RowHolder) -> RowAccount:
        """An account for the rows of one database."""
        account = RowAccount(self, holder)
        with self._lock:
            self._accounts.add(account)
        self._divide()
        return account

    def open_reader(self) -> ReaderAccount:
        """An account for one reader."""
        account = ReaderAccount(self)
        with self._lock:
            self._readers.add(account)
        self._divide()
        return account

    def share_cache(self, own: C) -> C:
        """The cache that all databases of the budget share: the first one that was given."""
        with self._lock:
            if self._cache is None:
                self._cache = own
            shared = self._cache
        self.fit_cache()
        return cast("C", shared)

    def remove(self, account: RowAccount | ReaderAccount) -> None:
        """The database or reader of this account was closed. The caller holds no lock."""
        with self._lock:
            if isinstance(account, RowAccount):
                self._accounts.discard(account)
            else:
                self._readers.discard(account)
        self._divide()
        self.settle()
        self._freed(DATABASE_BYTES)

    def ask_rows(self, account: RowAccount, used_bytes: int) -> tuple[bool, int]:
        """See `RowAccount.ask`."""
        step = plan_step(self.shares, used_bytes)
        with self._lock:
            others = sum(other.held for other in self._accounts if other is not account)
            starved = used_bytes > 0 and others + used_bytes + step > self.shares.rows
            account.starved = starved
            account.held = used_bytes if starved else used_bytes + step
        self.fit_cache()
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
        grant = self._flushes.take(size)
        try:
            yield
        finally:
            self._end(self._flushes, grant)

    @contextmanager
    def merging(self, size: int, check: Callable[[], object]) -> Iterator[None]:
        """Memory for one merge. Waits for other merges; one that is alone never waits.

        While it waits it calls `check`, which raises to end the wait.
        """
        grant = self._merges.take(size, check)
        try:
            self.fit_cache()
            yield
        finally:
            self._end(self._merges, grant)

    def usage(self) -> dict[str, int]:
        """What is in use now, in bytes."""
        with self._lock:
            rows = sum(account.held for account in self._accounts)
            readers = sum(account.held for account in self._readers)
            databases = len(self._accounts) + len(self._readers)
        return {
            "budget": self.total_bytes,
            "databases": databases * DATABASE_BYTES,
            "rows": rows,
            "readers": readers,
            "flushes": self._flushes.held_bytes,
            "merges": self._merges.held_bytes,
            "read_ahead": self.read_ahead.held_bytes,
            "uploaded_ssts": self.fresh.held_bytes,
        }

    def fit_cache(self) -> None:
        """Give the cache what the others leave. It grows again only when a database is opened or closed.

        Otherwise it would shrink, and start empty, whenever memtables are filled again.
        """
        merging = self._merges.held_bytes
        with self._lock:
            rows = sum(account.held for account in self._accounts)
            read = sum(account.held for account in self._readers)
            self._most_used = max(self._most_used, rows * 9 // 4 + merging + read)
            cache, capacity = self._cache, plan_cache_bytes(self.shares, used=self._most_used)
        if cache is not None and cache.resize(capacity):
            # At once, although the caller may hold a write lock: there are few steps, and the memory is needed now.
            allocator.trim()

    def _divide(self) -> None:
        """Divide the budget again: a database was opened or closed."""
        with self._lock:
            shares = plan_shares(self.total_bytes, databases=len(self._accounts) + len(self._readers))
            self.shares = shares
            self._most_used = 0
        self._flushes.resize(shares.flush)
        self._merges.resize(shares.merge)
        self.read_ahead.resize(shares.read_ahead)
        self.fresh.resize(shares.fresh)
        self.fit_cache()

    def _end(self, part: MemoryPart, grant: Grant) -> None:
        part.give_back(grant)
        self._freed(grant.size)

    def _freed(self, size: int) -> None:
        """So much was freed: return it to the system when it is a sixteenth of the budget. The caller holds no lock."""
        with self._lock:
            self._freed_bytes += size
            due = self._freed_bytes >= self.total_bytes // 16
            if due:
                self._freed_bytes = 0
        if due:
            allocator.trim()


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
