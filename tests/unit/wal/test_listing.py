from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flagstone.metadata.manifest import Manifest
from flagstone.runtime.pool import IoPool
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.types import WalId
from flagstone.wal.frontier import find_frontier
from golden.corpus import databases
from golden.reading import PlainReader

if TYPE_CHECKING:
    from kit.wal import WalFiles

PATHS = DbPaths("db")


def seen(replay_after: int, last_seen: int = 0) -> Manifest:
    return Manifest(replay_after_wal_id=WalId(replay_after), wal_id_last_seen=WalId(last_seen))


def test_an_empty_wal_ends_at_the_replay_start(wal: WalFiles, pool: IoPool) -> None:
    assert find_frontier(wal.store, PATHS, Manifest(), pool=pool) == 0
    assert wal.requests == {"head": 1}


@pytest.mark.parametrize(
    ("replay_after", "last", "expected", "requests"),
    [
        (7, 7, 7, 1),  # a clean close with all rows in SSTs
        (4, 7, 7, 2),  # a clean close without flushing memtables
        (7, 8, 7, 5),  # a crash after one or two files that no manifest records
        (7, 9, 7, 5),
        (4, 8, 7, 6),
        (4, 9, 7, 6),
    ],
)
def test_an_ordinary_open_takes_few_requests(
    wal: WalFiles, pool: IoPool, replay_after: int, last: int, expected: int, requests: int
) -> None:
    wal.add_files(1, last)

    found = find_frontier(wal.store, PATHS, seen(replay_after, expected), pool=pool)

    assert found == last
    assert wal.requests == {"head": requests}


@pytest.mark.parametrize(("last", "requests"), [(7, 1), (8, 2), (9, 4), (10, 4)])
def test_without_a_pool_probing_stops_at_the_first_miss(wal: WalFiles, last: int, requests: int) -> None:
    wal.add_files(1, last)

    assert find_frontier(wal.store, PATHS, seen(7)) == last
    assert wal.requests == {"head": requests}


def test_the_end_of_thousands_of_wal_files_is_found_with_few_requests(wal: WalFiles, pool: IoPool) -> None:
    wal.add_files(1, 4096)

    assert find_frontier(wal.store, PATHS, seen(3, 3), pool=pool) == 4096
    assert wal.requests["head"] < 50


def test_the_end_is_found_when_the_expected_file_does_not_exist(wal: WalFiles, pool: IoPool) -> None:
    wal.add_files(1, 20)

    assert find_frontier(wal.store, PATHS, seen(3, 90), pool=pool) == 20
    assert find_frontier(wal.store, PATHS, seen(3, 90)) == 20


def test_a_missing_wal_file_ends_the_wal(wal: WalFiles) -> None:
    wal.add_files(1, 3)
    wal.remove(2)

    assert find_frontier(wal.store, PATHS, Manifest()) == 1


def test_a_missing_wal_file_below_the_expected_one_does_not_end_the_wal(wal: WalFiles) -> None:
    # Replay then raises at the missing file, instead of ignoring the files behind it.
    wal.add_files(1, 5)
    wal.remove(2)

    assert find_frontier(wal.store, PATHS, seen(0, 5)) == 5


@pytest.mark.parametrize(("name", "last"), [("crash", 5), ("fencing", 5), ("wal_store", 3), ("gc", 10)])
@pytest.mark.parametrize("hinted", [True, False])
def test_the_end_of_a_wal_of_the_official_writer_is_found(name: str, last: int, hinted: bool) -> None:
    database = next(database for database in databases() if database.name == name)
    manifest = PlainReader(database).manifests.require_latest().value
    found = find_frontier(
        LocalStore(database.wal_store or database.store),
        DbPaths(database.path),
        manifest if hinted else replace(manifest, wal_id_last_seen=manifest.replay_after_wal_id),
    )

    assert found == last
