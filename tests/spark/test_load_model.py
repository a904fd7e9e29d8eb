"""Loads, writes, compactions and collections in random order, compared with a dictionary and with the wheel."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flagstone
from flagstone import Admin
from kit.databases import QUIET
from kit.spark_loads import load, shown

KEYS = st.sampled_from(
    [b"\0", b"0", b"9", b"K", b"\\", b"\\0", b"k", b"k\0", b"k0", b"kZ", b"k\\", b"k\xff", b"\xff"]
)
ROWS = st.dictionaries(KEYS, st.one_of(st.none(), st.binary(min_size=1, max_size=6)), max_size=8)
"""None stands for a deletion."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), ROWS),
        st.tuples(st.just("load"), ROWS),
        st.tuples(st.just("load in two"), ROWS),
        st.tuples(st.just("replace"), ROWS),
        st.tuples(st.just("leave in the WAL"), ROWS),
        st.tuples(st.sampled_from(["compact", "collect"]), st.just({})),
    ),
    max_size=8,
)


def cells(rows: list[tuple[bytes, bytes | None]]) -> dict[str, list[Any]]:
    return {
        "key": [key for key, _ in rows],
        "value": [value for _, value in rows],
        "op": ["put" if value is not None else "delete" for _, value in rows],
    }


def perform(folder: Path, step: str, rows: dict[bytes, bytes | None], left_open: list[flagstone.Db]) -> None:
    listed = list(rows.items())
    match step:
        case "write" | "leave in the WAL":
            db = flagstone.open(folder, settings=QUIET)
            for key, value in listed:
                db.delete(key) if value is None else db.put(key, value)
            if step == "write":
                db.close()
            else:
                db.flush("wal")  # not closed: the next writer fences this one
                left_open.append(db)
        case "load":
            load(folder, [cells(listed)])
        case "load in two":
            load(folder, [cells(listed[::2])], [cells(listed[1::2])])
        case "replace":
            load(folder, [cells(listed)], replaces_all=True)
        case "compact":
            Admin(folder).compact(full=True, patience=timedelta(seconds=0.1))
        case "collect":
            Admin(folder).collect_garbage(min_age=timedelta())


def applied(model: dict[bytes, bytes], step: str, rows: dict[bytes, bytes | None]) -> dict[bytes, bytes]:
    after: dict[bytes, bytes | None] = {**({} if step == "replace" else model), **rows}
    return {key: value for key, value in after.items() if value is not None}


@pytest.mark.long
@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=10)
@given(steps=STEPS)
def test_any_writes_and_loads_give_the_rows_of_a_dictionary(wheel: Any, steps: list[tuple[str, Any]]) -> None:
    home = Path(tempfile.mkdtemp(prefix="flagstone-model-"))
    folder, model = home / "db", dict[bytes, bytes]()
    left_open: list[flagstone.Db] = []
    try:
        load(folder, [cells([])])
        for step, rows in steps:
            perform(folder, step, rows, left_open)
            model = applied(model, step, rows)
            assert shown(folder) == model, step
            with flagstone.open_reader(folder, mode="latest") as reader:
                assert {key: value for key in model if (value := reader.get(key)) is not None} == model
        assert not Admin(folder).verify().findings
        assert wheel.scan(str(home), "db") == model
    finally:
        for db in left_open:
            with suppress(flagstone.FlagstoneError):
                db.close()
        shutil.rmtree(home)
