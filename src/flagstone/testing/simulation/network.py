"""Requests to the object store, and everything that can go wrong with them.

A request leaves its process, lands on the store some time later, and its reply comes back. The landing does not depend
on the caller: a request lands although its caller has given up or crashed, if need be days later. Requests of a process
are made through its `Link`, which is an `ObjectStore`.

Listings come in pages, as from S3. Other requests may land between two pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeVar

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.store.memory import MemoryStore
from flagstone.store.port import (
    NotWritten,
    ObjectMeta,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    StoreFull,
    Upload,
)
from flagstone.testing.simulation.scheduler import Process, Scheduler, Task, describe

T = TypeVar("T")

Fault = Literal["refused", "lost_reply", "late", "repeated", "slow", "full"]

WRITES: Final = frozenset(
    [
        "put",
        "upload_commit",
        "put_if_absent",
        "put_if_match",
        "copy",
        "delete",
        "log insert",
        "log replace",
        "log remove",
    ]
)
_UPLOADING: Final = frozenset(["upload_part", "upload_abort"])
"""Writes that no reader sees."""
_PAGE: Final = 7
_TIMEOUT_S: Final = 30.0
"""After this time a client gives up a request that was not answered."""
_LATEST_S: Final = (2.0, 90.0, 1_200.0, 7_200.0, 100_000.0, 300_000.0)
"""How late a delayed write may land: seconds, past a trust window, past the age of each kind of garbage, days."""


class Aim(NamedTuple):
    """A fault that strikes requests of one kind: those with this operation and with this text in their path."""

    op: str
    path: str
    fault: Fault
    rate: float


@dataclass(slots=True)
class Conditions:
    """How often each fault strikes a request, and how long requests take."""

    rates: dict[Fault, float] = field(default_factory=dict)
    aims: Sequence[Aim] = ()
    """Directed faults. They strike before the rates do."""
    latency_s: float = 0.02
    outage: bool = False
    """No request gets through."""


class Network:
    """All requests of a simulation to one store. `faults` counts what went wrong."""

    def __init__(self, scheduler: Scheduler, store: MemoryStore) -> None:
        self.scheduler = scheduler
        self.store = store
        self.conditions: Conditions = Conditions()
        self.cut_off: set[str] = set()
        """Names of machines that cannot reach the store."""
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.in_flight: int = 0
        """Writes that are still to land after their caller gave up."""
        self.watch: Callable[[str, str], None] | None = None
        """Called with the operation and the path of every write that lands."""
        self.directed: Callable[[str, str, Process], Fault | None] | None = None
        """Chooses a fault for a request of its own, before the rates do."""

    def call(self, process: Process, op: str, path: str, effect: Callable[[], T]) -> T:
        """Send a request from a task of `process`, and wait for its reply."""
        scheduler = self.scheduler
        scheduler.point()
        task = scheduler.current
        assert task is not None, "requests come from tasks"
        self.requests[op] += 1
        fault = self._choose(op, path, process)
        if fault is not None:
            self.faults[fault] += 1
        exchange = _Exchange(self, task, op, path, effect)
        delay_s = self.conditions.latency_s * (0.5 + scheduler.random.random())
        if fault is None:
            scheduler.after(delay_s, exchange.land_and_reply)
        elif fault == "slow":
            scheduler.after(delay_s * scheduler.random.choice((10, 100, 400)), exchange.land_and_reply)
        elif fault == "refused":
            scheduler.after(delay_s, exchange.refuse)
        elif fault == "full":
            scheduler.after(delay_s, exchange.fill)
        elif fault == "lost_reply":
            scheduler.after(delay_s, exchange.land)
            scheduler.after(_TIMEOUT_S, exchange.give_up)
        elif fault == "repeated":
            scheduler.after(delay_s, exchange.land)
            scheduler.after(delay_s * (1 + scheduler.random.random()), exchange.land_and_reply)
        else:
            self.in_flight += 1
            latest_s = scheduler.random.choice(_LATEST_S)

            def land_late() -> None:
                self.in_flight -= 1
                exchange.land()

            scheduler.after(_TIMEOUT_S, exchange.give_up)
            scheduler.after(_TIMEOUT_S + latest_s * scheduler.random.random(), land_late)
        scheduler.park()
        if exchange.error is not None:
            scheduler.note(f"{op} {path} {fault or ''} -> {describe(exchange.error)}")
            raise exchange.error
        scheduler.note(f"{op} {path} {fault or ''}")
        return exchange.answer  # type: ignore[no-any-return]

    def _choose(self, op: str, path: str, process: Process) -> Fault | None:
        conditions = self.conditions
        if conditions.outage or process.machine.name in self.cut_off:
            return "refused"
        if self.directed is not None:
            fault = self.directed(op, path, process)
            if fault is not None:
                return fault
        for aim in conditions.aims:
            if op == aim.op and aim.path in path and self.scheduler.random.random() < aim.rate:
                return aim.fault
        for fault, rate in conditions.rates.items():
            if self.scheduler.random.random() < rate:
                if op in WRITES | _UPLOADING or fault in ("refused", "lost_reply", "slow"):
                    return fault
                return "slow"
        return None


class _Exchange:
    """One request and its reply. A reply after the first is dropped."""

    __slots__ = ("_effect", "_network", "_op", "_path", "_replied", "_task", "answer", "error")

    def __init__(self, network: Network, task: Task, op: str, path: str, effect: Callable[[], Any]) -> None:
        self._network = network
        self._task = task
        self._op = op
        self._path = path
        self._effect = effect
        self._replied = False
        self.answer: Any = None
        self.error: FlagstoneError | None = None

    def land(self) -> None:
        try:
            self.answer, self.error = self._effect(), None
        except FlagstoneError as error:
            self.error = error
        else:
            if self._network.watch is not None and self._op in WRITES:
                self._network.watch(self._op, self._path)

    def land_and_reply(self) -> None:
        self.land()
        self._reply()

    def refuse(self) -> None:
        self.error = Unavailable(f"simulated: {self._op} of {self._path} was not sent")
        self._reply()

    def fill(self) -> None:
        kind = StoreFull if self._network.scheduler.random.random() < 0.5 else NotWritten
        self.error = kind(f"simulated: the store has no room for {self._path}")
        self._reply()

    def give_up(self) -> None:
        if not self._replied:
            self.error = Unavailable(f"simulated: no reply to {self._op} of {self._path}")
            self._reply()

    def _reply(self) -> None:
        if not self._replied:
            self._replied = True
            self._network.scheduler.wake(self._task)


class Link:
    """The store as one process reaches it."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    @property
    def url(self) -> str:
        return "simulated://"

    def get(self, path: str) -> StoredObject:
        return self._call("get", path, lambda: self._store.get(path))

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        return self._call("get_if_changed", path, lambda: self._store.get_if_changed(path, known))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._call("get_range", path, lambda: self._store.get_range(path, start, stop))

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._call("get_ranges", path, lambda: self._store.get_ranges(path, ranges))

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._call("get_tail", path, lambda: self._store.get_tail(path, length))

    def head(self, path: str) -> ObjectMeta:
        return self._call("head", path, lambda: self._store.head(path))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        while True:
            page = self._call("list", prefix, partial(self._page, prefix, after))
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].path

    def put(self, path: str, data: bytes) -> ObjectVersion:
        data = bytes(data)
        return self._call("put", path, lambda: self._store.put(path, data))

    def upload(self, path: str) -> Upload:
        return _LinkUpload(self._store.upload(path), path, self._call)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        data = bytes(data)
        return self._call("put_if_absent", path, lambda: self._store.put_if_absent(path, data, token=token))

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        data = bytes(data)
        return self._call(
            "put_if_match", path, lambda: self._store.put_if_match(path, data, version, token=token)
        )

    def copy(self, source: str, destination: str) -> None:
        self._call("copy", destination, lambda: self._store.copy(source, destination))

    def delete(self, path: str) -> None:
        self._call("delete", path, lambda: self._store.delete(path))

    def delete_many(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.delete(path)

    def _page(self, prefix: str, after: str | None) -> tuple[ObjectMeta, ...]:
        return tuple(islice(self._store.list(prefix, after=after), _PAGE))

    @property
    def _store(self) -> MemoryStore:
        return self._network.store

    def _call(self, op: str, path: str, effect: Callable[[], T]) -> T:
        return self._network.call(self._process, op, path, effect)


class _LinkUpload:
    """An upload whose parts and whose commit are requests of their own. Those that land after its end do nothing."""

    def __init__(
        self, inner: Upload, path: str, call: Callable[[str, str, Callable[[], None]], None]
    ) -> None:
        self._inner = inner
        self._path = path
        self._call = call

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, start: int, part: Piece) -> None:
        data = bytes(part)
        self._call("upload_part", self._path, lambda: self._inner.write(start, data))

    def commit(self) -> None:
        self._call("upload_commit", self._path, self._inner.commit)

    def abort(self) -> None:
        self._call("upload_abort", self._path, self._inner.abort)
