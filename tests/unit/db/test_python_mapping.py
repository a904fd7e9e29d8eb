"""CPython's own tests of mappings, on a database and on a transaction.

An adapter gives them keys and values of any kind, the length, the equality and the copy that a database refuses, and
the emptiness as truth. Three things do not apply: `test_fromkeys`, and the part of `test_constructor` that gives rows
to the constructor, because a database is opened; the part of `test_setdefault` that changes a stored list in place.
`TestHashMappingProtocol` tests hash tables. All others run: 17 cases on each.
"""

from __future__ import annotations

import ast
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import flagstone
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

mapping_tests = pytest.importorskip(
    "test.mapping_tests", reason="this Python was installed without its own tests"
)


def stored(thing: object) -> bytes:
    return repr(thing).encode()


def shown(data: bytes) -> Any:
    return ast.literal_eval(data.decode())


class _Keyed:
    """A mapping with `keys` and items only, as the one that it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def keys(self) -> Iterator[bytes]:
        return map(stored, self._wrapped.keys())

    def __getitem__(self, key: bytes) -> bytes:
        return stored(self._wrapped[shown(key)])


class Adapted:
    """Forwards each method to the method of that name, with keys and values of any kind written as text."""

    def __init__(self, rows: Any, create: Callable[[], Adapted]) -> None:
        self._rows = rows
        self._create = create

    def copy(self) -> Adapted:
        twin = self._create()
        twin._rows.update(self._rows)
        return twin

    def __getitem__(self, key: Any) -> Any:
        return shown(self._rows[stored(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._rows[stored(key)] = stored(value)

    def __delitem__(self, key: Any) -> None:
        del self._rows[stored(key)]

    def __contains__(self, key: Any) -> bool:
        return stored(key) in self._rows

    def __iter__(self) -> Iterator[Any]:
        return map(shown, self._rows)

    def __len__(self) -> int:
        return int(self._rows.count())

    def __bool__(self) -> bool:
        return bool(self._rows.keys())

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == (dict(other.items()) if isinstance(other, Adapted) else other)

    __hash__ = None  # type: ignore[assignment]

    def keys(self) -> Any:
        return _View(self, self._rows.keys(), shown)

    def values(self) -> Any:
        return _View(self, self._rows.values(), shown)

    def items(self) -> Any:
        return _View(self, self._rows.items(), lambda pair: tuple(map(shown, pair)))

    def get(self, key: Any, default: Any = None) -> Any:
        found = self._rows.get(stored(key))
        return default if found is None else shown(found)

    def pop(self, key: Any, *default: Any) -> Any:
        found = self._rows.pop(stored(key), *default)
        return shown(found) if isinstance(found, bytes) else found

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return shown(self._rows.setdefault(stored(key), stored(default)))

    def popitem(self, *arguments: Any) -> Any:
        return tuple(map(shown, self._rows.popitem(*arguments)))

    def clear(self, *arguments: Any) -> None:
        self._rows.clear(*arguments)

    def update(self, *rows: Any, **named: Any) -> None:
        given = rows[0] if rows else ()
        if hasattr(given, "keys"):
            self._rows.update(_Keyed(given))
        else:
            self._rows.update(tuple(map(stored, pair)) for pair in given)
        self._rows.update({stored(name): stored(value) for name, value in named.items()})


class _View:
    def __init__(self, rows: Adapted, view: Any, show: Any) -> None:
        self._rows, self._view, self._show = rows, view, show

    def __iter__(self) -> Iterator[Any]:
        return map(self._show, iter(self._view))

    def __contains__(self, key: Any) -> bool:
        return stored(key) in self._view


class OnADatabase(mapping_tests.TestMappingProtocol):  # type: ignore[misc, name-defined]
    def setUp(self) -> None:
        self.opened: list[Any] = []

    def tearDown(self) -> None:
        for handle in self.opened:
            handle.close()

    def type2test(self, *arguments: Any) -> Adapted:
        db = flagstone.open("db", store=MemoryStore(), settings=MANUAL)
        self.opened.append(db)
        return Adapted(db, self.type2test)

    def test_constructor(self) -> None:
        self.assertEqual(self._empty_mapping(), self._empty_mapping())  # noqa: PT009

    def test_setdefault(self) -> None:
        mapping_tests.BasicTestMappingProtocol.test_setdefault(self)

    @pytest.mark.slow
    def test_popitem(self) -> None:
        super().test_popitem()

    @unittest.skip("a database is opened; it is not made of keys")
    def test_fromkeys(self) -> None: ...


class InATransaction(OnADatabase):
    def type2test(self, *arguments: Any) -> Adapted:
        db = flagstone.open("db", store=MemoryStore(), settings=MANUAL)
        self.opened.append(db)
        transaction = db.transaction()
        self.addCleanup(transaction.rollback)
        return Adapted(transaction, self.type2test)
