"""Databases written, cloned, split, united, compacted and restored in any order hold what a dictionary would."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.errors import InvalidRequest
from flagstone.types import KeyRange
from kit.databases import Rows, World

KEYS = [
    start + rest
    for start in (b"\0", b"0", b"K", b"\\", b"k", b"\xff")
    for rest in (b"", b"\0", b"\\", b"\xff")
]
MOST = 7


@dataclass
class Model:
    """One database: its rows, its writable range, and the states of its checkpoints."""

    rows: Rows = field(default_factory=dict)
    keys: KeyRange = field(default_factory=KeyRange)
    saved: list[tuple[UUID, Rows]] = field(default_factory=list)


class Databases:
    """Real databases beside their models. Every step names databases by number, modulo how many there are."""

    def __init__(self) -> None:
        self.world = World()
        self.models: list[Model] = [Model()]
        self.world.write("db-0", {})

    def pick(self, number: int) -> tuple[str, Model]:
        number %= len(self.models)
        return f"db-{number}", self.models[number]

    def add(self, model: Model) -> str:
        self.models.append(model)
        return f"db-{len(self.models) - 1}"

    def write(self, number: int, operations: list[tuple[bytes, bytes | None]]) -> None:
        path, model = self.pick(number)
        with self.world.open(path) as db:
            for key, value in operations:
                if key not in model.keys:
                    continue
                if value is None:
                    db.delete(key)
                    model.rows.pop(key, None)
                else:
                    db.put(key, value)
                    model.rows[key] = value
        self.world.clock.advance(10)

    def clone(self, number: int) -> None:
        path, model = self.pick(number)
        self.world.admin(path).clone(self.add(Model(dict(model.rows), model.keys)))

    def split(self, number: int, border: bytes) -> None:
        path, model = self.pick(number)
        for part in (KeyRange(None, border), KeyRange(border, None)):
            keys = model.keys.intersect(part)
            if not keys.empty:
                rows = {key: value for key, value in model.rows.items() if key in keys}
                self.world.admin(path).clone(self.add(Model(rows, keys)), range=part)

    def unite(self, one: int, other: int) -> None:
        """Only neighbours, so that the model's range stays one range."""
        (path, model), (other_path, other_model) = sorted(
            (self.pick(one), self.pick(other)), key=lambda entry: entry[1].keys.start or b""
        )
        if path != other_path and model.keys.stop is not None and model.keys.stop == other_model.keys.start:
            keys = KeyRange(model.keys.start, other_model.keys.stop)
            self.world.admin(path).union(self.add(Model(model.rows | other_model.rows, keys)), [other_path])

    def compact(self, number: int) -> None:
        self.world.admin(self.pick(number)[0]).compact(full=True)

    def checkpoint(self, number: int) -> None:
        path, model = self.pick(number)
        model.saved.append((self.world.admin(path).create_checkpoint().id, dict(model.rows)))

    def restore(self, number: int, which: int) -> None:
        path, model = self.pick(number)
        if model.saved:
            saved, rows = model.saved[which % len(model.saved)]
            self.world.admin(path).restore(saved)
            model.rows = dict(rows)
            self.world.clock.advance(10)

    def check(self) -> None:
        for number, model in enumerate(self.models):
            path, expected = f"db-{number}", sorted(model.rows.items())
            assert sorted(self.world.scan(path).items()) == expected
            with self.world.open(path) as db:
                assert list(db.scan()) == expected
                assert list(db.scan(reverse=True)) == expected[::-1]
                inside = [key for key in KEYS if key in model.keys]
                assert db.multi_get(inside) == [model.rows.get(key) for key in inside]
                for key in set(KEYS) - set(inside):
                    with pytest.raises(InvalidRequest, match="writable range"):
                        db.get(key)
                batches = db.scan_arrow()
                found = [(row["key"], row["value"]) for row in batches.read_all().to_pylist()]
                assert found == expected
            for saved, rows in model.saved:
                assert self.world.scan(path, saved) == rows
            report = self.world.admin(path).verify()
            assert report.ok, report


numbers = st.integers(0, MOST)
operations = st.lists(
    st.tuples(st.sampled_from(KEYS), st.none() | st.binary(max_size=3)), min_size=1, max_size=8
)
steps = st.one_of(
    st.tuples(st.just("write"), numbers, operations),
    st.tuples(st.just("write"), numbers, operations),
    st.tuples(st.just("clone"), numbers),
    st.tuples(st.just("split"), numbers, st.sampled_from(KEYS)),
    st.tuples(st.just("split"), numbers, st.sampled_from(KEYS)),
    st.tuples(st.just("unite"), numbers, numbers),
    st.tuples(st.just("unite"), numbers, numbers),
    st.tuples(st.just("compact"), numbers),
    st.tuples(st.just("checkpoint"), numbers),
    st.tuples(st.just("restore"), numbers, numbers),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=settings.default.max_examples // 5 if settings.default else 10)
@given(st.lists(steps, min_size=3, max_size=12))
def test_any_clones_projections_unions_and_restores_have_the_rows_of_the_model(
    script: list[tuple[object, ...]],
) -> None:
    databases = Databases()
    for name, *arguments in script:
        if len(databases.models) > MOST and name in ("clone", "split", "unite"):
            continue
        getattr(databases, str(name))(*arguments)
    databases.check()
