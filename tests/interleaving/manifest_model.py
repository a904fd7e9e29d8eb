"""A model of manifests: writers create the next one, and a collector deletes old ones up to the boundary.

It runs on a store with conditional writes, or on one whose commit log decides each create. A flaw leaves out one
precaution; the tests show that the model then has a violation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from interleaving.explorer import Exploration, Operation, Process, explore

Flaw = Literal["none", "boundary not read", "boundary after the deletes"]


DELETED: Final = ("deleted",)
"""The value of the record of a deleted manifest."""


class Manifests(NamedTuple):
    """Manifests by id. A manifest is the tuple of all changes in it; `done` are those reported as committed."""

    stored: tuple[tuple[int, tuple[str, ...]], ...] = ((1, ()),)
    boundary: int = 0
    done: frozenset[str] = frozenset()
    records: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Of the two-phase store: what was decided for an id."""

    @property
    def highest(self) -> int:
        return max(dict(self.stored))


def check_manifests(manifests: Manifests) -> str | None:
    """Every change that was reported as committed is in the latest manifest."""
    lost = manifests.done - set(dict(manifests.stored)[manifests.highest])
    return f"{', '.join(sorted(lost))} was reported as committed and is lost" if lost else None


# -- conditional writes -----------------------------------------------------------------------------------


class Store(NamedTuple):
    """The steps that differ between stores."""

    find_highest: Callable[[], Process]
    create: Callable[[int, tuple[str, ...]], Process]
    delete: Callable[[int], Process]


def explore_manifests(
    *,
    updates: tuple[int, ...] = (2, 2),
    rounds: int = 2,
    checkpoints: frozenset[int] = frozenset(),
    flaw: Flaw = "none",
    two_phase: bool = False,
    remember: bool = False,
) -> Exploration:
    """One writer per entry of `updates`, which makes that many changes, beside a collector that makes `rounds`.

    `checkpoints` keep these manifests. Writers that `remember` build on their own last manifest without checking that
    it is still the latest.
    """
    store = TWO_PHASE if two_phase else CONDITIONAL
    processes = {
        f"writer {name}": partial(_writer, name, count, flaw, store, remember)
        for name, count in zip("ABCD", updates, strict=False)
    }
    processes["collector"] = partial(_collector, rounds, checkpoints, flaw, store)
    return explore(Manifests(), processes, check_manifests)


def _writer(name: str, updates: int, flaw: Flaw, store: Store, remember: bool) -> Process:
    number = highest = 0
    value: tuple[str, ...] | None = None
    while number < updates:
        if value is None:
            highest = yield from store.find_highest()
            value = yield _load(highest)
            if value is None:
                continue
            boundary = yield _read_boundary
            if highest <= boundary:
                value = None
                continue
        change = f"{name}{number}"
        made = (*value, change)
        value = None
        created = yield from store.create(highest + 1, made)
        if created and flaw != "boundary not read":
            boundary = yield _read_boundary
            created = highest + 1 > boundary
        if created:
            yield _report(change)
            number += 1
            if remember:
                highest, value = highest + 1, made


def _collector(rounds: int, checkpoints: frozenset[int], flaw: Flaw, store: Store) -> Process:
    number = 0
    while number < rounds:
        doomed = yield _list_old(checkpoints)
        if doomed and flaw != "boundary after the deletes":
            yield _advance(doomed[-1])
        left = doomed
        while left:
            yield from store.delete(left[0])
            left = left[1:]
        if doomed and flaw == "boundary after the deletes":
            yield _advance(doomed[-1])
        number += 1


def _find_highest() -> Process:
    return (yield _list_all)


def _list_all(now: Manifests) -> tuple[Manifests, int]:
    return now, now.highest


def _load(number: int) -> Operation:
    return lambda now: (now, dict(now.stored).get(number))


def _read_boundary(now: Manifests) -> tuple[Manifests, int]:
    return now, now.boundary


def _create(number: int, value: tuple[str, ...]) -> Process:
    return (yield _put(number, value))


def _put(number: int, value: tuple[str, ...]) -> Operation:
    def put_if_absent(now: Manifests) -> tuple[Manifests, bool]:
        if number in dict(now.stored):
            return now, False
        return now._replace(stored=_with(now.stored, number, value)), True

    return put_if_absent


def _report(change: str) -> Operation:
    return lambda now: (now._replace(done=now.done | {change}), None)


def _list_old(checkpoints: frozenset[int]) -> Operation:
    def list_old(now: Manifests) -> tuple[Manifests, tuple[int, ...]]:
        return now, tuple(sorted(n for n in dict(now.stored) if n < now.highest and n not in checkpoints))

    return list_old


def _advance(number: int) -> Operation:
    return lambda now: (now._replace(boundary=max(now.boundary, number)), None)


def _delete(number: int) -> Process:
    yield _erase(number)


def _erase(number: int) -> Operation:
    return lambda now: (now._replace(stored=_with(now.stored, number, None)), None)


CONDITIONAL: Final = Store(_find_highest, _create, _delete)


# -- the two-phase store ----------------------------------------------------------------------------------


def _find_highest_two_phase() -> Process:
    yield _complete_pending
    return (yield _list_all)


def _create_two_phase(number: int, value: tuple[str, ...]) -> Process:
    present = yield _load(number)
    if present is not None:
        return False
    decided = yield _decide(number, value)
    if not decided:
        yield _complete_pending
        return False
    # A copy reads first and writes later; between the two the collector may delete the manifest and its record.
    source = yield _read_source(number)
    if source is not None:
        yield _copy(number, source)
    return True


def _delete_two_phase(number: int) -> Process:
    yield _mark_deleted(number)
    yield _erase(number)
    yield _forget(number)


def _complete_pending(now: Manifests) -> tuple[Manifests, None]:
    stored = now.stored
    for number, value in now.records:
        if value is not DELETED and number not in dict(stored):
            stored = _with(stored, number, value)
    return now._replace(stored=stored), None


def _decide(number: int, value: tuple[str, ...]) -> Operation:
    def decide(now: Manifests) -> tuple[Manifests, bool]:
        if number in dict(now.records):
            return now, False
        return now._replace(records=_with(now.records, number, value)), True

    return decide


def _read_source(number: int) -> Operation:
    def read_source(now: Manifests) -> tuple[Manifests, tuple[str, ...] | None]:
        value = dict(now.records).get(number, DELETED)
        return now, None if value is DELETED else value

    return read_source


def _copy(number: int, value: tuple[str, ...]) -> Operation:
    return lambda now: (now._replace(stored=_with(now.stored, number, value)), None)


def _mark_deleted(number: int) -> Operation:
    return lambda now: (now._replace(records=_with(now.records, number, DELETED)), None)


def _forget(number: int) -> Operation:
    return lambda now: (
        now._replace(records=_with(now.records, number, None), stored=_with(now.stored, number, None)),
        None,
    )


TWO_PHASE: Final = Store(_find_highest_two_phase, _create_two_phase, _delete_two_phase)


def _with(entries: tuple[tuple[int, Any], ...], number: int, value: Any) -> tuple[tuple[int, Any], ...]:
    kept: Mapping[int, Any] = {**dict(entries), number: value}
    return tuple(sorted((key, entry) for key, entry in kept.items() if entry is not None))
