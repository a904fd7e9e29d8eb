"""One engine uses the checkpoints, clones, projections, unions and restored databases of the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import flagstone
from flagstone import Admin, KeyRange, Settings
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.operators import Concatenate
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from kit.databases import QUIET, Rows, numbered

GOLDEN = Path(__file__).parent.parent / "golden" / "data"


class SharedFolder:
    """A folder as object store, whose databases both engines use."""

    def __init__(self, folder: Path, wheel: Any) -> None:
        self.folder = str(folder)
        self.store = LocalStore(folder, fsync=False)
        self.wheel = wheel

    def admin(self, path: str) -> Admin:
        return Admin(path, store=self.store)

    def open(self, path: str, **options: Any) -> flagstone.Db:
        return flagstone.open(path, store=self.store, settings=QUIET, merge_operator=Concatenate(), **options)

    def write(self, path: str, rows: Rows, *, flush: bool = True) -> None:
        with self.open(path) as db:
            for key, value in rows.items():
                db.put(key, value)
            db.flush("memtable" if flush else "wal")

    def write_with_wheel(self, path: str, rows: Rows, **settings: Any) -> None:
        operations: list[tuple[Any, ...]] = [("put", key, value) for key, value in rows.items()]
        self.wheel.apply(
            self.folder, path, [*operations, ("flush", "memtable")], compactor_options=None, **settings
        )

    def scan(self, path: str, checkpoint: UUID | None = None) -> Rows:
        with flagstone.open_reader(
            path, store=self.store, mode="latest", checkpoint=checkpoint, merge_operator=Concatenate()
        ) as reader:
            return dict(reader.scan())

    def agree(self, path: str, expected: Rows) -> None:
        """Assert that both engines read the expected rows, and that verification finds no damage."""
        assert self.scan(path) == expected
        assert self.wheel.scan(self.folder, path) == expected
        keys = sorted(expected)
        assert self.wheel.get_many(self.folder, path, keys) == [expected[key] for key in keys]
        report = self.admin(path).verify()
        assert report.ok, report

    def use(self, path: str, expected: Rows, key: bytes) -> None:
        """Write, flush and compact with each engine, and assert that both still agree."""
        expected = dict(expected)
        self.agree(path, expected)
        self.write(path, {key: b"ours"})
        expected[key] = b"ours"
        self.agree(path, expected)
        self.write_with_wheel(path, {key: b"theirs"})
        expected[key] = b"theirs"
        self.agree(path, expected)
        self.admin(path).compact(full=True, merge_operator=Concatenate(), patience=timedelta(0))
        self.agree(path, expected)
        self.write_with_wheel(path, {key: b"theirs again"})
        expected[key] = b"theirs again"
        assert self.wheel.compact_everything(self.folder, path) == expected
        self.agree(path, expected)
        self.write(path, {key: b"ours again"})
        expected[key] = b"ours again"
        self.agree(path, expected)


@pytest.fixture
def shared(tmp_path: Path, wheel: Any) -> SharedFolder:
    return SharedFolder(tmp_path, wheel)


def by_us(shared: SharedFolder) -> Callable[..., Any]:
    def clone(to: str, path: str, keys: tuple[bytes | None, bytes | None] | None = None) -> None:
        shared.admin(path).clone(to, range=keys)

    return clone


def by_wheel(shared: SharedFolder) -> Callable[..., Any]:
    def clone(to: str, path: str, keys: tuple[bytes | None, bytes | None] | None = None) -> None:
        shared.wheel.clone(shared.folder, to, [(path, None, keys)])

    return clone


MAKERS = pytest.mark.parametrize("maker", [by_us, by_wheel], ids=["our clone", "the wheel's clone"])
PARENTS = pytest.mark.parametrize("parent", ["our parent", "the wheel's parent"])


def make_parent(shared: SharedFolder, parent: str, path: str, rows: Rows, more: Rows) -> None:
    """Two SSTs in L0; without a WAL, because the wheel projects only databases without any WAL file."""
    if parent == "our parent":
        settings = Settings(compactor_options=None, garbage_collector_options=None, wal_enabled=False)
        for part in (rows, more):
            with flagstone.open(path, store=shared.store, settings=settings) as db:
                for key, value in part.items():
                    db.put(key, value)
    else:
        shared.write_with_wheel(path, rows, wal_enabled=False)
        shared.write_with_wheel(path, more, wal_enabled=False)


@pytest.mark.slow
@MAKERS
@PARENTS
def test_both_open_and_write_a_clone(shared: SharedFolder, maker: Any, parent: str) -> None:
    rows = numbered(0, 40) | numbered(10, 20, b"w")
    make_parent(shared, parent, "p", numbered(0, 40), numbered(10, 20, b"w"))

    maker(shared)("c", "p")
    maker(shared)("d", "c")

    shared.use("c", rows, b"k005")
    shared.use("d", rows, b"k030")
    shared.agree("p", rows)


@pytest.mark.slow
@MAKERS
@pytest.mark.parametrize("writer", ["ours", "the wheel's"])
def test_a_clone_has_the_rows_that_are_only_in_the_wal(shared: SharedFolder, maker: Any, writer: str) -> None:
    shared.write("p", numbered(0, 10))
    if writer == "ours":
        db = shared.open("p")
        db.put(b"logged", b"1", await_durable=True)
    else:
        shared.wheel.hold(shared.folder, "p")
        assert shared.wheel.held_put("p", b"logged", b"1") == "durable"
    try:
        shared.admin("p").create_checkpoint()  # which also updates the end of the WAL in the manifest
        maker(shared)("c", "p")
    finally:
        if writer == "ours":
            db.close()
        else:
            shared.wheel.release("p")

    shared.use("c", numbered(0, 10) | {b"logged": b"1"}, b"k005")


@pytest.mark.slow
@MAKERS
@PARENTS
def test_both_read_only_the_range_of_a_projection(shared: SharedFolder, maker: Any, parent: str) -> None:
    make_parent(shared, parent, "p", numbered(0, 40), numbered(10, 30, b"w"))
    rows = numbered(0, 40) | numbered(10, 30, b"w")

    for to, start, stop in (("a", None, b"k015"), ("b", b"k015", b"k025"), ("c", b"k025", None)):
        maker(shared)(to, "p", (start, stop))
        part = {key: value for key, value in rows.items() if key in KeyRange(start, stop)}
        shared.use(to, part, (start or b"k000") + b"-new")

    shared.agree("p", rows)


def test_both_make_the_same_projection_of_a_compacted_database(shared: SharedFolder) -> None:
    make_parent(shared, "our parent", "p", numbered(0, 40), numbered(10, 30, b"w"))
    shared.wheel.compact_everything(shared.folder, "p")
    make_parent(shared, "the wheel's parent", "p", numbered(5, 35, b"x"), {})
    keys = (b"k012", b"k020")

    by_us(shared)("ours", "p", keys)
    by_wheel(shared)("theirs", "p", keys)

    ours, theirs = (shared.admin(path).manifest().value for path in ("ours", "theirs"))
    assert ours.tree == theirs.tree
    assert ours.ssts == theirs.ssts
    assert (ours.writer_epoch, ours.wal_id_last_seen) == (theirs.writer_epoch, theirs.wal_id_last_seen)
    shared.agree("ours", numbered(12, 20, b"x"))


@pytest.mark.slow
@PARENTS
def test_both_open_and_write_our_union(shared: SharedFolder, parent: str) -> None:
    make_parent(shared, parent, "p", numbered(0, 40), numbered(10, 30, b"w"))
    shared.wheel.compact_everything(shared.folder, "p")
    make_parent(shared, parent, "p", numbered(15, 20, b"x"), {})
    make_parent(shared, parent, "q", {b"z%d" % number: b"q" for number in range(10)}, {b"z5": b"r"})
    rows = numbered(0, 40) | numbered(10, 30, b"w") | numbered(15, 20, b"x")
    rows |= {b"z%d" % number: b"q" for number in range(10)} | {b"z5": b"r"}
    shared.admin("p").clone("a", range=(None, b"k017"))
    shared.wheel.clone(shared.folder, "b", [("p", None, (b"k017", None))])

    shared.admin("a").union("u", ["b", "q"])

    united = shared.admin("u").manifest().value
    assert sum(1 for _ in united.views) == 4  # p's L0 and sorted run, united again, and q's two
    assert len(united.external_dbs) == 2
    shared.use("u", rows, b"k020")
    shared.agree("a", {key: value for key, value in rows.items() if key < b"k017"})


@pytest.mark.slow
def test_both_open_and_write_the_wheels_union(shared: SharedFolder) -> None:
    """The wheel's union repeats view ids, so that its own compaction loses rows; our first claim gives new ids."""
    make_parent(shared, "the wheel's parent", "p", numbered(0, 40), numbered(10, 30, b"w"))
    rows = numbered(0, 40) | numbered(10, 30, b"w")
    for to, start, stop in (("a", None, b"k015"), ("b", b"k015", None)):
        shared.wheel.clone(shared.folder, to, [("p", None, (start, stop))])

    shared.wheel.clone(shared.folder, "u", [("a", None, None), ("b", None, None)])

    repeated = [view.id for view in shared.admin("u").manifest().value.views]
    assert len(set(repeated)) < len(repeated)
    assert shared.scan("u") == shared.wheel.scan(shared.folder, "u") == rows
    shared.write("u", {b"k020": b"ours"})
    ids = [view.id for view in shared.admin("u").manifest().value.views]
    assert len(set(ids)) == len(ids)
    shared.use("u", rows | {b"k020": b"ours"}, b"k020")


def test_we_clone_project_and_unite_the_wheels_union(shared: SharedFolder) -> None:
    make_parent(shared, "the wheel's parent", "p", numbered(0, 40), numbered(10, 30, b"w"))
    for to, start, stop in (("a", None, b"k015"), ("b", b"k015", None)):
        shared.wheel.clone(shared.folder, to, [("p", None, (start, stop))])
    shared.wheel.clone(shared.folder, "u", [("a", None, None), ("b", None, None)])
    rows = numbered(0, 40) | numbered(10, 30, b"w")

    shared.admin("u").clone("c")
    shared.admin("u").clone("left", range=(None, b"k020"))
    shared.admin("u").clone("right", range=(b"k020", None))
    shared.admin("left").union("v", ["right"])

    for path in ("c", "v"):
        assert shared.scan(path) == shared.wheel.scan(shared.folder, path) == rows
        assert shared.wheel.compact_everything(shared.folder, path) == rows
        assert shared.wheel.scan(shared.folder, path) == rows


def test_a_managed_reader_reads_the_wheels_union(shared: SharedFolder) -> None:
    make_parent(shared, "the wheel's parent", "p", numbered(0, 40), numbered(10, 30, b"w"))
    for to, start, stop in (("a", None, b"k015"), ("b", b"k015", None)):
        shared.wheel.clone(shared.folder, to, [("p", None, (start, stop))])
    shared.wheel.clone(shared.folder, "u", [("a", None, None), ("b", None, None)])

    with flagstone.open_reader("u", store=shared.store) as reader:
        assert dict(reader.scan()) == numbered(0, 40) | numbered(10, 30, b"w")


@pytest.mark.slow
def test_a_database_split_and_united_by_both_in_turn_keeps_its_rows(shared: SharedFolder) -> None:
    make_parent(shared, "our parent", "p0", numbered(0, 40), numbered(10, 30, b"w"))
    rows = numbered(0, 40) | numbered(10, 30, b"w")
    for turn in range(3):
        whole, border = f"p{turn}", b"k%03d" % (12 + 3 * turn)
        makers = [by_us(shared), by_wheel(shared)][:: 1 if turn % 2 else -1]
        makers[0](f"a{turn}", whole, (None, border))
        makers[1](f"b{turn}", whole, (border, None))
        shared.admin(f"a{turn}").union(f"p{turn + 1}", [f"b{turn}"])
        shared.agree(f"p{turn + 1}", rows)

    assert sum(1 for _ in shared.admin("p3").manifest().value.views) == 2
    assert len(shared.admin("p3").manifest().value.external_dbs) == 1


def test_segmented_databases_are_cloned_projected_and_united(shared: SharedFolder, wheel: Any) -> None:
    rows = {prefix + b"%d" % number: b"v" for prefix in (b"aaa", b"bbb", b"ccc") for number in range(5)}
    operations = [("put", key, value) for key, value in rows.items()]
    wheel.apply(shared.folder, "p", [*operations, ("flush", "memtable")], segments=True, wal_enabled=False)

    shared.admin("p").clone("a", range=(None, b"bbb3"))
    shared.admin("p").clone("b", range=(b"bbb3", None))
    shared.admin("a").union("u", ["b"])

    assert [s.prefix for s in shared.admin("a").manifest().value.segments] == [b"aaa", b"bbb"]
    assert wheel.apply(shared.folder, "u", [("put", b"bbb9", b"x")], segments=True) == rows | {b"bbb9": b"x"}
    with shared.open("u", segment_extractor=FixedPrefix("first3", 3)) as db:
        db.put(b"ddd", b"y")
    assert shared.scan("u") == rows | {b"bbb9": b"x", b"ddd": b"y"}


def test_each_reads_the_checkpoints_of_the_other(shared: SharedFolder, wheel: Any) -> None:
    shared.write("p", numbered(0, 10))
    ours = shared.admin("p").create_checkpoint(name="ours")
    theirs, manifest_id = wheel.create_checkpoint(shared.folder, "p", name="theirs", source=str(ours.id))
    shared.write("p", numbered(0, 10, b"w"))

    assert manifest_id == ours.manifest_id
    assert [name for *_, name in wheel.list_checkpoints(shared.folder, "p")] == ["ours", "theirs"]
    assert [entry.name for entry in shared.admin("p").checkpoints()] == ["ours", "theirs"]
    for checkpoint in (ours.id, UUID(theirs)):
        assert shared.scan("p", checkpoint) == numbered(0, 10)
        assert wheel.scan(shared.folder, "p", checkpoint=str(checkpoint)) == numbered(0, 10)
    wheel.edit_checkpoint(shared.folder, "p", str(ours.id), 60_000)
    renewed = shared.admin("p").refresh_checkpoint(theirs, timedelta(seconds=90))
    assert shared.admin("p").checkpoints("ours")[0].expires_s is not None
    assert renewed.expires_s is not None
    wheel.edit_checkpoint(shared.folder, "p", str(ours.id), 0)
    shared.admin("p").delete_checkpoint(theirs)
    assert wheel.list_checkpoints(shared.folder, "p") == []


def test_a_checkpoint_created_beside_the_wheels_writer_contains_the_durable_rows(
    shared: SharedFolder, wheel: Any
) -> None:
    wheel.hold(shared.folder, "p")
    try:
        assert wheel.held_put("p", b"a", b"1") == "durable"
        created = shared.admin("p").create_checkpoint()
        assert wheel.held_put("p", b"a", b"2") == "durable"
    finally:
        wheel.release("p")

    assert shared.scan("p", created.id) == {b"a": b"1"}
    assert wheel.scan(shared.folder, "p", checkpoint=str(created.id)) == {b"a": b"1"}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["ours", "the wheel's"])
def test_the_wheel_reads_the_rows_of_the_checkpoint_in_a_restored_database(
    shared: SharedFolder, wheel: Any, writer: str
) -> None:
    shared.write("p", numbered(0, 20))
    shared.wheel.compact_everything(shared.folder, "p")
    if writer == "ours":
        db = shared.open("p")
        db.put(b"logged", b"1", await_durable=True)
        db.merge(b"k003", b"+m", await_durable=True)
    else:
        wheel.hold(shared.folder, "p")
        assert wheel.held_put("p", b"logged", b"1") == "durable"
    checkpoint = shared.admin("p").create_checkpoint()
    expected = shared.scan("p", checkpoint.id)
    if writer == "ours":
        for key in numbered(5, 30):
            db.put(key, b"later")
        db.delete(b"k001")
        db.flush()
        db.put(b"lost", b"1", await_durable=True)
    else:
        assert wheel.held_put("p", b"lost", b"1") == "durable"

    shared.admin("p").restore(checkpoint.id)

    if writer == "ours":
        with pytest.raises(flagstone.Closed):
            db.put(b"k001", b"zombie", await_durable=True)
        db.close()
    else:
        assert wheel.held_put("p", b"k001", b"zombie") != "durable"
        wheel.release("p")
    assert b"lost" not in expected
    shared.use("p", expected, b"k005")


@pytest.mark.slow
def test_golden_clones_are_cloned_and_projected(shared: SharedFolder, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "clone", tmp_path, dirs_exist_ok=True)
    for path in ("parent", "child", "grandchild", "projected", "union"):
        rows = shared.scan(path)
        if path != "grandchild":  # its WAL has rows, which a clone copies
            shared.admin(path).clone(f"new-{path}", range=(None, b"zzzz"))
        else:
            shared.admin(path).clone(f"new-{path}")
        shared.agree(f"new-{path}", rows)


def test_golden_checkpoints_are_cloned(shared: SharedFolder, tmp_path: Path, wheel: Any) -> None:
    shutil.copytree(GOLDEN / "checkpoints", tmp_path, dirs_exist_ok=True)
    admin = shared.admin("db")
    for held in admin.checkpoints():
        if held.expires_s is None:
            rows = shared.scan("db", held.id)
            admin.clone(f"from-{held.id}", checkpoint=held.id)
            shared.agree(f"from-{held.id}", rows)
            admin.restore(held.id)
            assert shared.scan("db") == wheel.scan(shared.folder, "db") == rows


def test_the_wal_of_a_clone_is_on_the_separate_wal_store(tmp_path: Path, wheel: Any) -> None:
    main, logs = LocalStore(tmp_path / "main", fsync=False), LocalStore(tmp_path / "logs", fsync=False)
    db = flagstone.open("p", store=main, wal_store=logs, settings=QUIET)
    db.put(b"a", b"1", await_durable=True)
    Admin("p", store=main, wal_store=logs).clone("c")
    db.close()

    folders = str(tmp_path / "main"), str(tmp_path / "logs")
    assert wheel.scan(folders[0], "c", wal_folder=folders[1]) == {b"a": b"1"}
    assert [meta.path for meta in main.list(DbPaths("c").wal_folder)] == []
    wheel.clone(folders[0], "d", [("c", None, None)], wal_folder=folders[1])
    with flagstone.open("d", store=main, wal_store=logs, settings=QUIET) as clone:
        assert dict(clone.scan()) == {b"a": b"1"}
