"""Databases to damage, what they hold, and the ways in which bytes go wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import flagstone
from flagstone import Admin, ReaderSettings, WalReader
from flagstone.errors import CorruptData, FlagstoneError
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.stores import ManifestStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from kit.databases import MANUAL

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
PATHS = DbPaths("db")
CODECS = ("", "Snappy", "Zlib", "Lz4", "Zstd")
GOLDEN_NAMES = (
    "basic",
    "blocks_1k",
    "checkpoints",
    "codec_zstd",
    "codec_lz4",
    "compaction",
    "crash",
    "filters",
    "gc",
)
KINDS = ("manifest", "wal", "compacted", "compactions", "gc")


@dataclass(frozen=True)
class Database:
    """The objects of a database, and what every way to read it shows while they are sound."""

    name: str
    objects: Mapping[str, bytes]
    ours: bool

    def store(self, changed: Mapping[str, bytes] | None = None) -> MemoryStore:
        store = MemoryStore()
        for path, data in {**self.objects, **(changed or {})}.items():
            store.put(path, data)
        return store

    def targets(self, kind: str) -> list[str]:
        """The objects of a kind whose damage can be seen: of manifests and compactions files the newest."""
        found = sorted(path for path in self.objects if path.split("/")[1] == kind and self.objects[path])
        return found[-1:] if kind in ("manifest", "compactions") else found


@cache
def our_database(codec: str = "") -> Database:
    """SSTs in L0 and in a sorted run, an unflushed WAL, a finished job, and boundaries."""
    store = MemoryStore()
    settings = MANUAL.replace(compression_codec=codec or None, min_filter_keys=10)
    with flagstone.open("db", store=store, settings=settings) as db:
        for number in range(300):
            db.put(b"key%05d" % number, b"value %d " % number * 5)
        db.flush()
        for number in range(0, 300, 7):
            db.delete(b"key%05d" % number)
        db.flush()
    Admin("db", store=store).compact(full=True, patience=timedelta(0))
    with flagstone.open("db", store=store, settings=settings) as db:
        for number in range(300, 340):
            db.put(b"key%05d" % number, b"new %d" % number)
        db.flush()
    Admin("db", store=store).create_checkpoint(None, name="kept")
    Boundary(store, PATHS.boundary("manifest")).advance(2)
    Boundary(store, PATHS.boundary("compactions")).advance(1)
    # Left open: what is on the store is what a crash leaves.
    db = flagstone.open("db", store=store, settings=settings)
    for number in range(4):
        db.put(b"key%05d" % (1000 + number), b"only in the WAL")
        db.put(b"key%05d" % (5 * number), b"newest %d" % number)
        db.flush("wal")
    objects = contents_of(store)
    db.close()
    return Database(f"ours {codec or 'plain'}", objects, ours=True)


@cache
def golden_database(name: str) -> Database:
    """One that the official wheel wrote."""
    return Database(name, contents_of(LocalStore(GOLDEN / name)), ours=False)


def contents_of(store: ObjectStore) -> dict[str, bytes]:
    return {
        meta.path: store.get(meta.path).data
        for meta in store.list("db")
        if meta.path.split("/")[1] in (*KINDS, "flagstone")
    }


# -- ways to read ---------------------------------------------------------------------------------------------


def read_rows(store: ObjectStore) -> Any:
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        rows = list(reader.scan())
        found = [reader.get(key) for key, _ in rows[::17]]
        return rows, found


def read_arrow(store: ObjectStore) -> Any:
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        return reader.scan_arrow().read_all().to_pydict()


def write_rows(store: ObjectStore) -> Any:
    with flagstone.open("db", store=store, settings=MANUAL, create=False) as db:
        return list(db.scan())


def read_changes(store: ObjectStore) -> Any:
    return list(WalReader("db", store=store).changes())


def read_jobs(store: ObjectStore) -> Any:
    return Admin("db", store=store).compactions()


def read_boundary(store: ObjectStore) -> Any:
    return ManifestStore(store, PATHS).read_boundary(), read_rows(store)


def verify(store: ObjectStore) -> Any:
    report = Admin("db", store=store).verify()
    if not report.ok:
        raise CorruptData(str(report.damage[0]))
    # Without the sizes: a file that has lost nothing but its checksum is sound.
    return report.manifest_id, report.rows, [str(finding) for finding in report.findings]


WAYS: Mapping[str, tuple[Callable[[ObjectStore], Any], ...]] = {
    "manifest": (read_rows, write_rows, verify),
    "wal": (read_rows, write_rows, read_changes, verify),
    "compacted": (read_rows, read_arrow, verify),
    "compactions": (read_jobs, verify),
    "gc": (read_boundary, verify),
}


# -- damage ---------------------------------------------------------------------------------------------------


def damage(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one thing wrong: a flipped bit, a cut, a hole, or a part that is missing, twice or elsewhere."""
    kind = chance.choice(("bit", "bit", "byte", "cut", "zero", "drop", "double", "move", "random"))
    if kind == "bit":
        at = chance.randrange(8 * len(data))
        return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]
    start = chance.randrange(len(data))
    stop = min(len(data), start + 1 + int(chance.expovariate(1 / (1 + len(data) / 8))))
    part = data[start:stop]
    if kind == "byte":
        return data[:start] + chance.randbytes(1) + data[start + 1 :]
    if kind == "cut":
        # An empty WAL file is a fence by the format, so a cut leaves something.
        return data[: max(start, 1)]
    if kind == "zero":
        return data[:start] + bytes(len(part)) + data[stop:]
    if kind == "drop":
        return (data[:start] + data[stop:]) or data[:1]
    if kind == "double":
        return data[:stop] + part + data[stop:]
    if kind == "move":
        rest = data[:start] + data[stop:]
        at = chance.randrange(len(rest) + 1)
        return rest[:at] + part + rest[at:]
    return data[:start] + chance.randbytes(len(part)) + data[stop:]


@dataclass
class Tally:
    """How many cases ended how: `named` by kind of error, `same`, `different`, `unnamed`."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def note(self, outcome: str, detail: str = "") -> None:
        self.outcomes[outcome] += 1
        if detail:
            self.failures.append(detail)


def judge(tally: Tally, database: Database, kind: str, chance: random.Random) -> None:
    """One case: damage an object of that kind and read the database in one of the ways."""
    targets = database.targets(kind)
    if not targets:
        return
    path = chance.choice(targets)
    way = chance.choice(WAYS[kind])
    broken = damage(database.objects[path], chance)
    if broken == database.objects[path]:
        return
    expected = truth(database, way)
    where = f"{database.name} {way.__name__} {path} {broken.hex() if len(broken) < 600 else len(broken)}"
    try:
        found = way(database.store({path: broken}))
    except FlagstoneError as error:
        tally.note(f"named {type(error).__name__}")
        return
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        tally.note("unnamed", f"{type(error).__name__}: {error}: {where}")
        return
    if found == expected:
        tally.note("same")
    elif database.ours or kind in ("wal", "compacted"):
        tally.note("different", f"different: {where}")
    else:
        tally.note("different, without a checksum")


class CachedReader:
    """A reader's disk cache of one database, filled once; each case damages one part file of it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._store = database.store()
        self._settings = ReaderSettings(object_store_cache_options={"root_folder": str(folder)})
        self._expected = self._read()
        self._parts = {file: file.read_bytes() for file in sorted(folder.rglob("*.part"))}
        assert self._parts, "the reader fills its cache"

    def judge(self, tally: Tally, chance: random.Random) -> None:
        """A damaged part costs a request: the rows must be the same, without an error."""
        file, sound = chance.choice(sorted(self._parts.items()))
        broken = damage(sound, chance)
        if broken == sound:
            return
        file.write_bytes(broken)
        try:
            same = self._read() == self._expected
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            tally.note("unnamed", f"{type(error).__name__}: {error}: {file} {len(broken)}")
        else:
            tally.note("same") if same else tally.note("different", f"different: {file} {broken.hex()}")
        file.write_bytes(sound)

    def _read(self) -> Any:
        with flagstone.open_reader("db", store=self._store, mode="latest", settings=self._settings) as reader:
            rows = list(reader.scan())
            return rows, [reader.get(key) for key, _ in rows[::17]]


@cache
def _truth(name: str, ours: bool, way: Callable[[ObjectStore], Any]) -> Any:
    database = our_database(name) if ours else golden_database(name)
    return way(database.store())


def truth(database: Database, way: Callable[[ObjectStore], Any]) -> Any:
    name = database.name.partition(" ")[2].replace("plain", "") if database.ours else database.name
    return _truth(name, database.ours, way)
