"""Checks whether a correct database may produce a history.

Sequence numbers give the order of all writes, so no search is needed: the state at every sequence number is known,
and a history is correct if every call can be assigned a sequence number.

    writes        a write that began after another had returned has the greater sequence number
    reads         there is a sequence number at which all values of the read are current. It is not below that of a
                  write or read which had returned before this one began, and it is below that of every write which
                  began after it had returned. That is linearizability of the whole database, so of every key, and
                  includes reading one's own writes, monotonic reads and atomic batches
    snapshots     the same for the sequence number they claim and the call that made them, for every read
    transactions  the same, and no other write of a key they write lies between their start and their commit
    serializable  the graph of precedence (ww, wr, rw, and real time) has no cycle. An rw edge leaves a
                  transaction under snapshot isolation only if it wrote nothing: write skew is allowed there

`durable_only` reads may lag behind: they must show one state, never an older one, and include all durable rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from histories.history import Op, Seen, apply

ENDLESS = 1 << 62

Span = tuple[int, int]
"""Sequence numbers, half open."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    why: str


class Checker:
    def __init__(self, ops: Iterable[Op]) -> None:
        self.ops = sorted(ops, key=lambda op: op.begin)
        self.anomalies: list[Anomaly] = []
        self.writes = sorted(
            (op for op in self.ops if op.seq is not None and op.committed), key=lambda op: op.seq or 0
        )
        # Of each key: the numbers, values and writers of its versions; the first stands for the empty database.
        self.seqs: dict[bytes, list[int]] = defaultdict(lambda: [0])
        self.values: dict[bytes, list[bytes | None]] = defaultdict(lambda: [None])
        self.writers: dict[bytes, list[Op | None]] = defaultdict(lambda: [None])
        self.found: dict[Seen, list[int]] = defaultdict(list)
        self.other: dict[bytes, str] = {}
        self.points: dict[int, int] = {}
        """The moment each read was given, by identity of the call."""

    def check(self) -> list[Anomaly]:
        self._replay()
        for op in self.ops:
            self._settle_own_reads(op)
        self._check_order_of_writes()
        everything = [(op.end, op.seq) for op in self.writes if op.seq]
        durable = [(op.end, op.seq) for op in self.writes if op.durable and op.seq]
        finished = _newest_before(everything)
        durable += [(op.end, finished(op.begin)) for op in self.ops if op.durable and op.name == "flush"]
        plain = [op for op in self.ops if not (op.durable and op.name.startswith("read"))]
        self._check_reads([op for op in plain if _reads(op)], finished)
        self._check_reads(
            [op for op in self.ops if op.durable and op.name.startswith("read")], _newest_before(durable)
        )
        self._check_lost_updates()
        self._check_cycles(plain)
        return self.anomalies

    def _report(self, kind: str, *why: object) -> None:
        self.anomalies.append(Anomaly(kind, "; ".join(map(str, why))))

    # -- the states --------------------------------------------------------------------------------------

    def _replay(self) -> None:
        for one, other in pairwise(self.writes):
            if one.seq == other.seq:
                self._report("sequence number used twice", one, other)
        for op in self.writes:
            assert op.seq is not None
            by_key: dict[bytes, list[tuple[str, bytes]]] = defaultdict(list)
            for key, kind, value in op.wrote:
                by_key[key].append((kind, value))
            for key, effects in by_key.items():
                before = self.values[key][-1]
                for end in range(1, len(effects)):
                    partial = apply(before, effects[:end])  # type: ignore[arg-type]
                    if partial is not None:
                        self.other[partial] = "intermediate read"
                self.seqs[key].append(op.seq)
                self.values[key].append(apply(before, effects))  # type: ignore[arg-type]
                self.writers[key].append(op)
        for op in self.ops:
            if not op.committed:
                self.other.update({value: "aborted read" for _, kind, value in op.wrote if kind != "delete"})
        for key, values in self.values.items():
            for position, state in enumerate(values):
                self.found[key, state].append(position)

    def _spans(self, key: bytes, value: bytes | None) -> list[Span]:
        """The numbers at which `key` had this value."""
        if key not in self.seqs:
            return [(0, ENDLESS)] if value is None else []
        seqs = self.seqs[key]
        return [
            (seqs[at], seqs[at + 1] if at + 1 < len(seqs) else ENDLESS)
            for at in self.found.get((key, value), ())
        ]

    def _moments(self, seen: Iterable[Seen]) -> list[Span]:
        """The numbers at which all of it was true."""
        moments: list[Span] = [(0, ENDLESS)]
        for spans in sorted((self._spans(*each) for each in seen), key=len):
            moments = _both(moments, spans)
            if not moments:
                break
        return moments

    # -- writes and reads --------------------------------------------------------------------------------

    def _check_order_of_writes(self) -> None:
        finished = _newest_before([(op.end, op.seq) for op in self.writes if op.seq])
        for op in self.writes:
            assert op.seq is not None
            if finished(op.begin) > op.seq:
                later = next(w for w in reversed(self.writes) if w.end < op.begin)
                self._report("writes out of order", f"{op} began after {later} had returned")

    def _check_reads(self, reads: list[Op], finished: Callable[[int], int]) -> None:
        begun = _oldest_after([(op.begin, op.seq) for op in self.writes if op.seq])
        ends: list[tuple[int, int]] = []
        for op in sorted(reads, key=lambda op: op.begin):
            end = op.looked or op.end
            strange = [each for each in op.seen if not self._spans(*each)]
            if strange:
                key, value = strange[0]
                self._report(self.other.get(value or b"", "unknown value"), f"{key!r} = {value!r}", op)
                continue
            moments = self._moments(op.seen)
            if not moments:
                self._report("fractured read", "these values were never there together", op)
                continue
            if op.at is not None:
                claimed = _both(moments, [(op.at, op.at + 1)])
                if not claimed:
                    self._report("wrong snapshot", f"what it saw stood at {moments}", op)
                    continue
                moments = claimed
            newest, oldest = finished(op.begin), begun(end)
            bound = max((point for ended, point in ends if ended < op.begin), default=0)
            if not _both(moments, [(newest, ENDLESS)]):
                missed = self._missed(op, newest)
                own = missed is not None and missed.client == op.client
                self._report("lost own write" if own else "stale read", op, f"it misses {missed}")
            elif not _both(moments, [(0, oldest)]):
                self._report("future read", op, f"write {oldest} began after it had returned")
            elif not (possible := _both(moments, [(max(newest, bound), oldest)])):
                self._report("reads go back", op, f"an earlier read was at {bound} or later")
            else:
                point = possible[0][0]
                self.points[id(op)] = point
                ends = _pruned([*ends, (end, point)], op.begin)

    def _missed(self, op: Op, newest: int) -> Op | None:
        """A write that had returned before `op` began, and whose key it saw as it was before; rather its own."""
        missed: Op | None = None
        for key, value in op.seen:
            for write in self.writers[key][1:]:
                if write is not None and write.end < op.begin and write.seq is not None:
                    visible = [span for span in self._spans(key, value) if span[1] > write.seq]
                    if not visible and (missed is None or write.client == op.client):
                        missed = write
        if missed is None:
            missed = next((write for write in self.writes if write.seq == newest), None)
        return missed

    # -- transactions ------------------------------------------------------------------------------------

    def _settle_own_reads(self, op: Op) -> None:
        """A transaction sees its own writes. Below operands of its own it sees what others wrote."""
        for key, effects, value in op.own:
            if any(kind != "merge" for kind, _ in effects):
                right = value == apply(None, effects)
            else:
                operands = apply(None, effects) or b""
                right = value is not None and value.endswith(operands)
                if value is not None and right:
                    op.seen.append((key, value.removesuffix(operands) or None))
            if not right:
                self._report("own write not seen", f"{key!r} = {value!r} after {effects}", op)

    def _check_lost_updates(self) -> None:
        for op in self.writes:
            if op.isolation is None or op.at is None or op.seq is None:
                continue
            for key in {key for key, _, _ in op.wrote}:
                position = bisect_left(self.seqs[key], op.seq) - 1
                if self.seqs[key][position] > op.at:
                    self._report("lost update", f"{key!r}", op, f"overwrites {self.writers[key][position]}")

    def _check_cycles(self, ops: list[Op]) -> None:
        graph = _Graph([op for op in ops if op.committed and (op.seen or op.wrote)])
        for writers in self.writers.values():
            for one, other in pairwise(writers[1:]):
                graph.edge(one, other, "ww")
        for op in graph.ops:
            point = self.points.get(id(op))
            if point is None:
                continue
            for key, _ in op.seen:
                if key not in self.seqs:
                    continue
                position = bisect_right(self.seqs[key], point) - 1
                graph.edge(self.writers[key][position], op, "wr")
                # Under snapshot isolation a reader that writes need not come before what overwrites its reads.
                if position + 1 < len(self.seqs[key]) and not (op.isolation == "snapshot" and op.wrote):
                    graph.edge(op, self.writers[key][position + 1], "rw")
        graph.add_real_time()
        for cycle in graph.cycles():
            self._report("cycle", *(f"{op} --{kind}-->" for op, kind in cycle))


class _Graph:
    """The graph of precedence. Real time is a chain of nodes, which keeps the number of edges small."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops
        self._number = {id(op): number for number, op in enumerate(ops)}
        self._next: list[set[int]] = [set() for _ in ops]
        self._kinds: dict[tuple[int, int], str] = {}

    def edge(self, one: Op | None, other: Op | None, kind: str) -> None:
        if one is not None and other is not None and one is not other:
            self._add(self._number[id(one)], self._number[id(other)], kind)

    def add_real_time(self) -> None:
        ends = sorted(op.end for op in self.ops)
        moment = {end: len(self.ops) + at for at, end in enumerate(ends)}
        self._next += [set() for _ in ends]
        for one, other in pairwise(ends):
            self._add(moment[one], moment[other], "then")
        for number, op in enumerate(self.ops):
            self._add(number, moment[op.end], "then")
            before = bisect_left(ends, op.begin) - 1
            if before >= 0:
                self._add(moment[ends[before]], number, "then")

    def cycles(self) -> list[list[tuple[Op, str]]]:
        """A shortest cycle of each knot."""
        return [self._shortest(knot) for knot in _components(self._next) if len(knot) > 1]

    def _add(self, one: int, other: int, kind: str) -> None:
        self._next[one].add(other)
        self._kinds.setdefault((one, other), kind)

    def _shortest(self, knot: set[int]) -> list[tuple[Op, str]]:
        start = min(knot)
        came: dict[int, int] = {}
        queue = [start]
        for node in queue:
            for after in self._next[node]:
                if after in knot and after not in came:
                    came[after] = node
                    queue.append(after)
            if start in came:
                break
        path = [start]
        while (before := came[path[-1]]) != start:
            path.append(before)
        path = [start, *reversed(path[1:]), start]
        edges: list[tuple[Op, str]] = []
        for one, other in pairwise(path):
            if one < len(self.ops):
                edges.append((self.ops[one], self._kinds[one, other]))
        return edges


def _components(edges: list[set[int]]) -> list[set[int]]:
    """Strongly connected components (Tarjan), without recursion."""
    order = [0] * len(edges)
    low = [0] * len(edges)
    on_stack = [False] * len(edges)
    stack: list[int] = []
    found: list[set[int]] = []
    time = 0
    for root in range(len(edges)):
        if order[root]:
            continue
        time += 1
        order[root] = low[root] = time
        stack.append(root)
        on_stack[root] = True
        work = [(root, iter(edges[root]))]
        while work:
            node, rest = work[-1]
            for after in rest:
                if not order[after]:
                    time += 1
                    order[after] = low[after] = time
                    stack.append(after)
                    on_stack[after] = True
                    work.append((after, iter(edges[after])))
                    break
                if on_stack[after]:
                    low[node] = min(low[node], order[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    knot = set()
                    while True:
                        member = stack.pop()
                        on_stack[member] = False
                        knot.add(member)
                        if member == node:
                            break
                    found.append(knot)
    return found


def _reads(op: Op) -> bool:
    return bool(op.seen) or op.at is not None


def _both(one: list[Span], other: list[Span]) -> list[Span]:
    """What is in both; each is in ascending order."""
    shared = []
    at = by = 0
    while at < len(one) and by < len(other):
        start, stop = max(one[at][0], other[by][0]), min(one[at][1], other[by][1])
        if start < stop:
            shared.append((start, stop))
        if one[at][1] < other[by][1]:
            at += 1
        else:
            by += 1
    return shared


def _newest_before(ends: list[tuple[int, int]]) -> Callable[[int], int]:
    """The greatest number of those that had returned before a moment; 0 without one."""
    ends = sorted(ends)
    times, greatest = [end for end, _ in ends], [0, *accumulate((seq for _, seq in ends), max)]
    return lambda moment: greatest[bisect_left(times, moment)]


def _oldest_after(begins: list[tuple[int, int]]) -> Callable[[int], int]:
    """The smallest number of those that began after a moment."""
    begins = sorted(begins)
    times = [begin for begin, _ in begins]
    smallest = [*accumulate((seq for _, seq in reversed(begins)), min, initial=ENDLESS)][::-1]
    return lambda moment: smallest[bisect_right(times, moment)]


def _pruned(ends: list[tuple[int, int]], now: int) -> list[tuple[int, int]]:
    """Of the reads that had returned by now only the one with the greatest number can still matter."""
    past = [each for each in ends if each[0] < now]
    return [each for each in ends if each[0] >= now] + ([max(past, key=lambda each: each[1])] if past else [])


def check(ops: Iterable[Op]) -> list[Anomaly]:
    return Checker(ops).check()
