"""Flagstone on a store with the latency of S3 Standard or S3 Express: how long callers wait, and what a month costs.

The store is in memory behind `LatencyStore`, which waits and counts. One profile after the other; within each, every
workload on a database of its own or freshly opened. Costs are list prices for what was counted.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple

import flagstone
from bench.harness import Bars, formatted, markdown_table, sized, write_markdown
from bench.latency_store import EXPRESS, STANDARD, LatencyStore, Profile
from bench.prices import PRICE_LIST, SECONDS_A_MONTH
from flagstone.store.memory import MemoryStore

ROWS: Final = sized(800_000, quickly=4_000)
KEY_BYTES: Final = 20
VALUE: Final = random.Random(3).randbytes(100)
READ_BYTES: Final = ROWS * (KEY_BYTES + len(VALUE))
WRITERS: Final = (1, 8, 64)
SECONDS: Final = sized(6.0, quickly=0.1)
"""How long each workload of writers lasts."""
PACED: Final = (("100 durable puts/s, 8 writers", 100, 8, True), ("1,000 durable puts/s, 64 writers", 1000, 64, True),
                ("1,000 puts/s, no caller waits", 1000, 1, False))  # fmt: skip
GETS: Final = sized(200, quickly=5)
OPENINGS: Final = sized(5, quickly=1)
SCANS: Final = sized(5, quickly=1)
READ_AHEAD_BYTES: Final = 4 << 20
STORED_GB: Final = 100
COLD_GETS_A_SECOND: Final = 10


class Month(NamedTuple):
    """The cost of a workload in a month."""

    requests: float
    dollars: float

    def __str__(self) -> str:
        millions = f"{self.requests / 1e6:,.{0 if self.requests >= 1e7 else 2}f}"
        return f"${self.dollars:,.2f} for {millions} M requests"


@dataclass
class Seen:
    """What happened during a workload: calls with their seconds, requests and bytes."""

    seconds: float = 0.0
    calls: list[float] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    """Of a single request."""

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.calls)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3

    def month(self, profile: Profile, times_a_month: float) -> Month:
        """The cost of repeating it that many times."""
        once = profile.prices.requests(self.requests)
        once += profile.prices.moved(sent=self.moved["sent"], received=self.moved["received"])
        return Month(self.requests.total() * times_a_month, once * times_a_month)


@contextmanager
def observed(store: LatencyStore) -> Iterator[Seen]:
    """The requests to the store during the block, and its duration."""
    seen, requests, moved = Seen(), store.requests.copy(), store.moved.copy()
    store.longest_s = 0.0
    started = time.perf_counter()
    yield seen
    seen.seconds, seen.longest_s = time.perf_counter() - started, store.longest_s
    seen.requests, seen.moved = store.requests - requests, store.moved - moved


def key(number: int) -> bytes:
    return b"%020d" % number


def load() -> MemoryStore:
    """A database of one sorted run, made without any latency."""
    store = MemoryStore()
    numbers = random.Random(4).sample(range(ROWS), ROWS)
    with flagstone.open("db", store=store) as db:
        for number in numbers:
            db.put(key(number), VALUE)
        db.flush("memtable")
        # Once more, so that no WAL is left that the next open would replay.
        db.put(key(0), VALUE)
        db.flush("memtable")
    flagstone.Admin("db", store=store).compact(full=True, patience=timedelta(seconds=0.1))
    return store


def durable_puts(profile: Profile, writers: int) -> Seen:
    """Writers that each wait for their put to be durable before the next."""
    store = LatencyStore(MemoryStore(), profile)
    with flagstone.open("db", store=store) as db, observed(store) as seen:
        end = time.perf_counter() + SECONDS

        def write(writer: int) -> None:
            number = writer
            while (started := time.perf_counter()) < end:
                db.put(key(number), VALUE, await_durable=True)
                seen.calls.append(time.perf_counter() - started)
                number += writers

        together(write, writers)
    return seen


def paced_puts(profile: Profile, rate: int, writers: int, *, durable: bool) -> Seen:
    """The given number of puts a second, spread evenly over the writers and the time."""
    store = LatencyStore(MemoryStore(), profile)
    with flagstone.open("db", store=store) as db, observed(store) as seen:
        begin = time.perf_counter()

        def write(writer: int) -> None:
            for number in range(writer, int(rate * SECONDS), writers):
                time.sleep(max(begin + number / rate - time.perf_counter(), 0))
                started = time.perf_counter()
                db.put(key(number), VALUE, await_durable=durable)
                seen.calls.append(time.perf_counter() - started)

        together(write, writers)
    return seen


def together(work: Callable[[int], None], count: int) -> None:
    """Run `work` in that many threads."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copied(inner: MemoryStore, profile: Profile) -> LatencyStore:
    """A copy of the store with latency: each open leaves a fence in the WAL that the next one has to find."""
    copy = MemoryStore()
    for found in inner.list(""):
        copy.put(found.path, inner.get(found.path).data)
    return LatencyStore(copy, profile)


def openings(inner: MemoryStore, profile: Profile) -> Seen:
    """Open the existing database several times; the requests are those of one open."""
    opened = Seen()
    for _ in range(OPENINGS):
        store = copied(inner, profile)
        with observed(store) as seen:
            db = flagstone.open("db", store=store)
        db.close()
        opened.calls.append(seen.seconds)
        opened.requests = seen.requests
    return opened


def gets(inner: MemoryStore, profile: Profile) -> dict[str, Seen]:
    """One key after the other: for the first time, again, and a hundred others in one call."""
    store = copied(inner, profile)
    numbers = random.Random(5).sample(range(ROWS), GETS + 100)
    with flagstone.open("db", store=store) as db:
        found = {}
        for name in ("cold get", "warm get"):
            with observed(store) as seen:
                for number in numbers[:GETS]:
                    started = time.perf_counter()
                    assert db.get(key(number)) == VALUE
                    seen.calls.append(time.perf_counter() - started)
            found[name] = seen
        with observed(store) as seen:
            assert None not in db.multi_get([key(number) for number in numbers[GETS:]])
        found["multi_get"] = seen
    return found


def scan(inner: MemoryStore, profile: Profile, count: Callable[[flagstone.Db], int]) -> Seen:
    """Everything, in order, with nothing cached: the median of several scans."""
    seen_all = []
    for _ in range(SCANS):
        store = copied(inner, profile)
        with flagstone.open("db", store=store) as db, observed(store) as seen:
            assert count(db) == ROWS
        seen_all.append(seen)
    return sorted(seen_all, key=lambda seen: seen.seconds)[SCANS // 2]


def _rows(**options: Any) -> Callable[[flagstone.Db], int]:
    return lambda db: sum(1 for _ in db.scan(**options))


def measure(inner: MemoryStore, profile: Profile) -> dict[str, Seen]:
    """All workloads of one profile, except idling."""
    found = {f"{writers} writers": durable_puts(profile, writers) for writers in WRITERS}
    for name, rate, writers, durable in PACED:
        found[name] = paced_puts(profile, rate, writers, durable=durable)
    return {
        **found,
        "open": openings(inner, profile),
        **gets(inner, profile),
        "scan": scan(inner, profile, _rows()),
        "reverse scan": scan(inner, profile, _rows(reverse=True)),
        "small scan": scan(inner, profile, _rows(read_ahead_bytes=READ_AHEAD_BYTES)),
        "arrow scan": scan(
            inner, profile, lambda db: sum(batch.num_rows for batch in db.scan_arrow(batch_rows=None))
        ),
    }


def run() -> str:
    """Measure both profiles, write `results/latency.md`."""
    profiles = [replace(profile, nearer=sized(1.0, quickly=10.0)) for profile in (STANDARD, EXPRESS)]
    inner, idle_store = load(), LatencyStore(MemoryStore(), profiles[0])
    with flagstone.open("db", store=idle_store) as idle:
        idle.put(b"key", b"value", await_durable=True)
        found = {profiles[0].name: measure(inner, profiles[0])}
        # The start-up work of the database ended more than a minute ago.
        with observed(idle_store) as idling:
            found[profiles[1].name] = measure(inner, profiles[1])
    for seen in found.values():
        seen["idle"] = idling
    months = {profile.name: monthly(profile, found[profile.name]) for profile in profiles}
    described = {name: describe(seen) for name, seen in found.items()}
    costs = {what: {name: month[what] for name, month in months.items()} for what in months[STANDARD.name]}
    rates = {
        _writers(writers): {name: _rate(seen[f"{writers} writers"]) for name, seen in found.items()}
        for writers in WRITERS
    }
    dollars = {what: {name: month.dollars for name, month in cost.items()} for what, cost in costs.items()}
    names = [profile.name for profile in profiles]
    kept = " and ".join(
        f"${profile.prices.stored_gb * STORED_GB:,.2f} ({profile.name})" for profile in profiles
    )
    return write_markdown(
        "latency",
        "Simulated latency: S3 Standard and S3 Express One Zone",
        ["what", *names],
        [[what, *(described[name][what] for name in names)] for what in described[names[0]]],
        [
            "Durable puts of 20 + 100 bytes by threads that each wait for their own. One upload is under way at a time. A put that comes",
            "during an upload waits for its end and then for the next one, which such puts share. So one writer waits one round trip,",
            "many wait up to two, and requests do not grow with the number of writers.",
            f"Reads of a database of {ROWS:,} rows ({READ_BYTES / 1e6:.0f} MB) in one sorted run. Default settings.",
            "",
            "What a month costs, without keeping the data:",
            "",
            *markdown_table(
                ["work, around the clock", *names],
                [[what, *(str(cost[name]) for name in names)] for what, cost in costs.items()],
            ),
            "",
            f"Keeping {STORED_GB} GB costs {kept} a month. List prices, {PRICE_LIST}: requests, for Express",
            "also bytes. Flushing and compacting come on top: a few requests for every 64 MB written, and for Express the bytes of",
            "each rewriting.",
            "",
            *markdown_table(
                ["assumed", "get, ms", "put, ms", "list, ms", "head, ms", "MB/s per connection"],
                [_assumed(profile) for profile in profiles],
            ),
            "",
            "Log-normal, median / 99th percentile. Assumptions that fit what is published about the services, not measurements of",
            "them. What limits the figures above is the round trip: of a put, of one or two gets. A scan begins with small requests and",
            "reads ahead up to four times as far as it has come, with up to eight requests at once; its first round trips are a good part of the time",
            "that a database of this size takes. Warm gets cost the call from Python.",
        ],
        basis=f"Simulated waiting, counted requests; {SECONDS:g} s for each number of writers.",
        bars=[
            Bars("durable-puts", "Durable puts per second, by writers waiting at the same time", "/s", rates),
            Bars("dollars", "Dollars per month at given rates", "$", dollars),
        ],
    )


def describe(seen: Mapping[str, Seen]) -> dict[str, str]:
    """The figures of one profile, in words."""
    told_of = {}
    for writers in WRITERS:
        puts = seen[f"{writers} writers"]
        told_of[f"durable put, {_writers(writers)}"] = (
            f"{formatted(_rate(puts), '/s')}, {_waiting(puts)}, {puts.requests['put'] / len(puts.calls):.2f} PUT each"
        )
    for name, *_ in PACED:
        puts = seen[name]
        told_of[name] = f"{_waiting(puts)}, {puts.requests['put'] / puts.seconds:,.1f} PUT/s"
    opening, cold, warm = seen["open"], seen["cold get"], seen["warm get"]
    told_of["open, existing database"] = (
        f"{statistics.median(opening.calls) * 1e3:,.0f} ms, {opening.requests.total()} requests"
    )
    told_of["get, cold"] = f"{_waiting(cold)}, {cold.requests['get'] / GETS:.2f} GET each"
    told_of["get, warm"] = f"{statistics.median(warm.calls) * 1e6:.1f} µs, no request"
    told_of["100 keys, cold, one `multi_get`"] = (
        f"{seen['multi_get'].seconds * 1e3:,.0f} ms, {seen['multi_get'].requests['get']} GET, "
        f"the slowest {seen['multi_get'].longest_s * 1e3:,.0f} ms"
    )
    for what, name in (
        ("full scan, cold", "scan"),
        ("full scan, cold, backward", "reverse scan"),
        ("full scan, cold, as Arrow", "arrow scan"),
        (f"full scan, cold, {READ_AHEAD_BYTES >> 20} MiB of read-ahead", "small scan"),
    ):
        rate = READ_BYTES / 1e6 / seen[name].seconds
        told_of[what] = f"{rate:,.0f} MB/s, {seen[name].requests['get']} GET"
    return told_of


def monthly(profile: Profile, seen: Mapping[str, Seen]) -> dict[str, Month]:
    """A month of each workload."""

    def always(name: str) -> Month:
        return seen[name].month(profile, SECONDS_A_MONTH / seen[name].seconds)

    costs = {"idle, with compactor and collector": always("idle")}
    costs |= {name: always(name) for name, *_ in PACED}
    cold = seen["cold get"].month(profile, COLD_GETS_A_SECOND * SECONDS_A_MONTH / GETS)
    costs[f"{COLD_GETS_A_SECOND} cold gets/s"] = cold
    hourly = seen["scan"].month(profile, SECONDS_A_MONTH / 3600 * 1e9 / READ_BYTES)
    costs["a cold scan of 1 GB every hour"] = hourly
    return costs


def _assumed(profile: Profile) -> list[str]:
    waits = [profile.get, profile.put, profile.list, profile.head]
    return [
        profile.name,
        *(f"{wait.median * 1e3:.0f} / {wait.p99 * 1e3:.0f}" for wait in waits),
        f"{profile.bytes_per_second / 1e6:.0f}",
    ]


def _writers(count: int) -> str:
    return "1 writer" if count == 1 else f"{count} writers"


def _rate(seen: Seen) -> float:
    return len(seen.calls) / seen.seconds


def _waiting(seen: Seen) -> str:
    """Median and 99th percentile of the calls."""
    half, most = seen.percentile_ms(0.5), seen.percentile_ms(0.99)
    if half < 0.1:
        return f"p50 {half * 1e3:.1f} µs, p99 {most * 1e3:.0f} µs"
    return f"p50 {half:.0f} ms, p99 {most:.0f} ms"


if __name__ == "__main__":
    print(run())
