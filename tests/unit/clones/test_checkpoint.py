"""Checkpoints: what they keep, how long, and which calls are refused."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.metadata.manifest import Checkpoint, add_checkpoint
from flagstone.metadata.stores import ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.resolve import resolve
from flagstone.types import ManifestId
from kit.databases import QUIET, World, numbered

UNKNOWN = UUID(int=0x5EED << 64)


def test_a_checkpoint_refers_to_the_manifest_that_adds_it(world: World) -> None:
    world.write("p", numbered(0, 5))

    created = world.admin("p").create_checkpoint(name="first", lifetime=timedelta(minutes=5))

    assert created.manifest_id == world.admin("p").manifest().id
    assert created.expires_s == created.created_s + 300
    assert world.admin("p").checkpoints() == (created,)
    assert world.admin("p").checkpoints("first") == (created,)
    assert world.admin("p").checkpoints("other") == ()


def test_a_checkpoint_created_from_another_keeps_the_same_manifest(world: World) -> None:
    world.write("p", numbered(0, 5))
    first = world.admin("p").create_checkpoint(lifetime=timedelta(minutes=5))
    world.write("p", numbered(0, 5, b"w"))

    second = world.admin("p").create_checkpoint(source=str(first.id))

    assert second.manifest_id == first.manifest_id
    assert second.expires_s is None
    assert world.scan("p", second.id) == numbered(0, 5)


def test_a_checkpoint_of_an_administrator_has_the_durable_rows_of_a_running_writer(world: World) -> None:
    with world.open("p") as db:
        db.put(b"a", b"1", await_durable=True)
        db.put(b"b", b"2")

        created = world.admin("p").create_checkpoint()

    assert world.scan("p", created.id) == {b"a": b"1"}


def test_scope_all_covers_every_written_row(world: World) -> None:
    with world.open("p") as db:
        db.put(b"a", b"1")
        created = db.checkpoint()
        db.put(b"a", b"2")

        assert world.scan("p", created.id) == {b"a": b"1"}


def test_scope_durable_covers_rows_in_the_wal_and_none_in_memory(world: World) -> None:
    with world.open("p") as db:
        db.put(b"a", b"1", await_durable=True)
        db.put(b"b", b"2")
        created = db.checkpoint(scope="durable", name="d")

        assert db.manifest().last_l0_seq == 0
        assert world.scan("p", created.id) == {b"a": b"1"}


def test_scope_all_does_not_wait_for_room_in_l0(world: World) -> None:
    world.write("p", numbered(0, 3))
    with flagstone.open(
        "p",
        store=world.store,
        clock=world.clock,
        settings=QUIET.replace(l0_max_ssts=1),
    ) as db:
        db.put(b"late", b"1")
        created = db.checkpoint()

        assert world.scan("p", created.id) == numbered(0, 3) | {b"late": b"1"}


def test_refresh_changes_the_expiry_and_delete_removes_the_checkpoint(world: World) -> None:
    world.write("p", numbered(0, 5))
    admin = world.admin("p")
    created = admin.create_checkpoint(lifetime=timedelta(seconds=10))
    world.clock.advance(5_000)

    renewed = admin.refresh_checkpoint(str(created.id), timedelta(seconds=10))
    forever = admin.refresh_checkpoint(created.id)
    admin.delete_checkpoint(created.id)

    assert renewed.expires_s == created.created_s + 15
    assert forever.expires_s is None
    assert admin.checkpoints() == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda admin: admin.create_checkpoint(source=UNKNOWN), "no checkpoint"),
        (lambda admin: admin.create_checkpoint(source="nonsense"), "no checkpoint has the id or name"),
        (lambda admin: admin.create_checkpoint(lifetime=timedelta(milliseconds=999)), "at least one second"),
        (lambda admin: admin.create_checkpoint(lifetime=60), "60 has no unit"),
        (lambda admin: admin.create_checkpoint(lifetime=timedelta(days=365_000)), "2106"),
        (lambda admin: admin.refresh_checkpoint(UNKNOWN), "no checkpoint"),
        (lambda admin: admin.delete_checkpoint(UNKNOWN), "no checkpoint"),
        (lambda admin: admin.manifest(99), "no manifest 99"),
        (lambda admin: admin.restore(UNKNOWN), "no checkpoint"),
        (lambda admin: admin.clone("c", checkpoint=UNKNOWN), "no checkpoint"),
    ],
)
def test_invalid_arguments_are_refused_and_change_no_object(world: World, call: object, message: str) -> None:
    world.write("p", numbered(0, 5))
    before = world.objects()

    with pytest.raises(InvalidRequest, match=message):
        call(world.admin("p"))  # type: ignore[operator]

    assert world.objects() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: admin.manifest(),
        lambda admin: admin.manifests(),
        lambda admin: admin.manifest(1),
        lambda admin: admin.checkpoints(),
        lambda admin: admin.create_checkpoint(),
        lambda admin: admin.refresh_checkpoint(UNKNOWN),
        lambda admin: admin.delete_checkpoint(UNKNOWN),
        lambda admin: admin.clone("c"),
        lambda admin: admin.union("u", ["q"]),
        lambda admin: admin.restore(UNKNOWN),
        lambda admin: admin.destroy(),
        lambda admin: admin.destroy(soft=True),
    ],
)
def test_every_call_for_a_path_without_a_database_is_refused_and_creates_none(
    world: World, call: object
) -> None:
    with pytest.raises(InvalidRequest, match=r"no database at 'nowhere'"):
        call(world.admin("nowhere"))  # type: ignore[operator]

    assert world.objects() == {}


def test_an_expired_checkpoint_is_refused_as_a_source(world: World) -> None:
    world.write("p", numbered(0, 5))
    expired = world.admin("p").create_checkpoint(lifetime=timedelta(seconds=1))
    world.clock.advance(2_000)
    before = world.objects()

    for call in (
        lambda: world.admin("p").create_checkpoint(source=expired.id),
        lambda: world.admin("p").clone("c", checkpoint=expired.id),
        lambda: world.admin("p").restore(expired.id),
    ):
        with pytest.raises(InvalidRequest, match="expired 1 s ago"):
            call()
    assert world.objects() == before
    assert world.admin("p").refresh_checkpoint(expired.id).expires_s is None


def test_a_retention_checkpoint_is_refused_as_a_source(world: World) -> None:
    world.write("p", numbered(0, 5))
    retention = Checkpoint(UNKNOWN, ManifestId(0), 0)
    manifests = ManifestStore(world.store, DbPaths("p"), clock=world.clock)
    manifests.update(lambda now: add_checkpoint(now.value, retention))
    before = world.objects()

    for call in (
        lambda: world.admin("p").create_checkpoint(source=UNKNOWN),
        lambda: world.admin("p").clone("c", checkpoint=UNKNOWN),
        lambda: world.admin("p").restore(UNKNOWN),
    ):
        with pytest.raises(InvalidRequest, match="consumer of changes"):
            call()
    assert world.objects() == before


def test_an_unknown_scope_is_refused(world: World) -> None:
    with world.open("p") as db, pytest.raises(InvalidRequest, match="'all' or 'durable'"):
        db.checkpoint(scope="some")  # type: ignore[arg-type]


def test_an_unpickled_admin_works_on_the_same_database(tmp_path: Path) -> None:
    name = "views-admin"
    flagstone.open("p", store=MemoryStore.named(name)).close()
    for admin in (
        Admin(f"memory://{name}/p"),
        Admin("p", store=MemoryStore.named(name), wal_store=f"memory://{name}"),
    ):
        copy = pickle.loads(pickle.dumps(admin))
        assert copy.create_checkpoint().id in [entry.id for entry in admin.checkpoints()]
        assert repr(copy) == repr(admin)
    flagstone.open(tmp_path / "p").close()
    local = pickle.loads(pickle.dumps(Admin(tmp_path / "p")))
    assert local.manifest().value.initialized


def test_a_pickled_admin_has_no_secret() -> None:
    store = resolve(
        "s3://bucket", access_key_id="AKIAID", secret_access_key="hidden-words", region="eu-west-1"
    )
    admin = Admin("p", store=store)

    assert b"hidden-words" not in pickle.dumps(admin)
    assert "hidden-words" not in repr(admin)
