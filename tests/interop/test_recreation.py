"""At the path of a destroyed database the official wheel opens a database that we create, and creates its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, Closed, InvalidRequest
from flagstone.metadata.destruction import incarnation
from flagstone.store.local import LocalStore
from kit.databases import QUIET


def write(store: LocalStore, rows: dict[bytes, bytes]) -> None:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        for key, value in rows.items():
            db.put(key, value, await_durable=True)
        db.flush()


def read(store: LocalStore) -> dict[bytes, bytes]:
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        return dict(reader.scan())


@pytest.mark.slow
def test_the_wheel_opens_a_database_that_we_create_at_a_destroyed_path(wheel: Any, tmp_path: Path) -> None:
    store, folder = LocalStore(tmp_path), str(tmp_path)
    for number in range(3):
        write(store, {b"old%d" % number: b"v"})
        Admin("db", store=store).destroy()
    write(store, {b"new": b"1"})
    assert wheel.scan(folder, "db") == {b"new": b"1"}
    assert wheel.apply(folder, "db", [("put", b"wheel", b"2")]) == {b"new": b"1", b"wheel": b"2"}
    assert read(store) == {b"new": b"1", b"wheel": b"2"}
    assert Admin("db", store=store).verify().ok


def test_a_database_that_the_wheel_creates_at_a_destroyed_path_is_not_the_destroyed_one(
    wheel: Any, tmp_path: Path
) -> None:
    store, folder = LocalStore(tmp_path), str(tmp_path)
    write(store, {b"old": b"v"})
    admin = Admin("db", store=store)
    last_id = admin.manifest().id
    with (
        flagstone.open("db", store=store, settings=QUIET) as writer,
        flagstone.open_reader("db", store=store, mode="latest") as reader,
    ):
        admin.destroy()
        with pytest.raises(InvalidRequest, match="no database"):
            admin.manifest()
        assert wheel.apply(folder, "db", [("put", b"wheel", b"2")]) == {b"wheel": b"2"}
        with pytest.raises(Closed):
            writer.put(b"late", b"1", await_durable=True)
        with pytest.raises(Closed, match="destroyed"):
            reader.refresh()
    assert read(store) == {b"wheel": b"2"}
    assert admin.manifest().id > incarnation(admin.manifest().value) > last_id
    write(store, {b"ours": b"3"})
    assert wheel.scan(folder, "db") == {b"wheel": b"2", b"ours": b"3"}
    admin.destroy()


def test_the_wheel_reads_a_clone_made_at_a_destroyed_path(wheel: Any, tmp_path: Path) -> None:
    store, folder = LocalStore(tmp_path), str(tmp_path)
    with flagstone.open("clone", store=store, settings=QUIET) as db:
        db.put(b"old", b"v", await_durable=True)
    Admin("clone", store=store).destroy()
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"k", b"only in the WAL", await_durable=True)
        Admin("db", store=store).clone("clone")
    assert wheel.scan(folder, "clone") == {b"k": b"only in the WAL"}
