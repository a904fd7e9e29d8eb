from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flagstone.errors import Closed
from flagstone.metadata.manifest import Manifest
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectVersion
from flagstone.types import WalId
from flagstone.wal.frontier import write_fence

if TYPE_CHECKING:
    from kit.wal import WalFiles

PATHS = DbPaths("db")


def unneeded() -> Manifest:
    raise AssertionError("the manifest was read again without need")


def test_the_fence_is_an_empty_wal_file(wal: WalFiles) -> None:
    assert write_fence(wal.store, PATHS, WalId(1), Manifest(), refresh=unneeded) == 1
    assert wal.memory.get(PATHS.wal(WalId(1))).data == b""
    assert wal.requests == {"put_if_absent": 1}


def test_the_fence_goes_behind_existing_files_and_reads_the_manifest_for_each(wal: WalFiles) -> None:
    wal.add_files(1, 4)
    reads = 0

    def refresh() -> Manifest:
        nonlocal reads
        reads += 1
        return Manifest()

    assert write_fence(wal.store, PATHS, WalId(3), Manifest(), refresh=refresh) == 5
    assert reads == 2


def test_a_newer_claim_stops_the_placing_of_a_fence(wal: WalFiles) -> None:
    wal.add(1)

    def refresh() -> Manifest:
        raise Closed("a newer writer", reason="fenced")

    with pytest.raises(Closed, match="newer"):
        write_fence(wal.store, PATHS, WalId(1), Manifest(), refresh=refresh)
    assert [meta.path for meta in wal.memory.list("db/wal")] == [PATHS.wal(WalId(1))]


def test_a_fence_is_not_placed_where_replay_skips_it(wal: WalFiles) -> None:
    # The former writer flushed and collected its WAL between our search for its end and our claim.
    wal.add_files(1, 8)
    wal.remove(1, 2, 3, 4)
    claimed = Manifest(replay_after_wal_id=WalId(6), wal_id_last_seen=WalId(8))

    assert write_fence(wal.store, PATHS, WalId(3), claimed, refresh=lambda: claimed) == 9


def test_a_fence_is_not_placed_at_the_last_file_that_replay_skips(wal: WalFiles) -> None:
    claimed = Manifest(replay_after_wal_id=WalId(3), wal_id_last_seen=WalId(3))

    assert write_fence(wal.store, PATHS, WalId(3), claimed, refresh=lambda: claimed) == 4


def test_a_fence_goes_behind_files_flushed_while_it_is_placed(wal: WalFiles) -> None:
    wal.add_files(1, 8)
    moved = Manifest(replay_after_wal_id=WalId(8), wal_id_last_seen=WalId(8))

    assert write_fence(wal.store, PATHS, WalId(2), Manifest(), refresh=lambda: moved) == 9


def test_a_fenced_writer_cannot_use_the_wal_id_and_the_next_fence_goes_behind_it(wal: WalFiles) -> None:
    fence = write_fence(wal.store, PATHS, WalId(1), Manifest(), refresh=unneeded)

    with pytest.raises(ObjectExists):
        wal.memory.put_if_absent(PATHS.wal(fence), b"rows of the former writer")
    assert write_fence(wal.store, PATHS, fence, Manifest(), refresh=Manifest) == fence + 1


def test_a_fence_is_placed_behind_a_writer_that_keeps_flushing() -> None:
    class Busy(MemoryStore):
        """The former writer flushes one more WAL file right before each of the first three attempts."""

        flushes = 3

        def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
            if data == b"" and self.flushes:
                self.flushes -= 1
                super().put_if_absent(path, b"rows")
            return super().put_if_absent(path, data, token=token)

    assert write_fence(Busy(), PATHS, WalId(1), Manifest(), refresh=Manifest) == 4


def test_the_end_is_not_fenced_if_a_newer_writer_claimed_the_database_before_it_was_searched_again(
    wal: WalFiles,
) -> None:
    wal.add_files(1, 8)
    claimed = Manifest(replay_after_wal_id=WalId(6), wal_id_last_seen=WalId(6))

    def refresh() -> Manifest:
        raise Closed("the newer writer has written file 8", reason="fenced")

    with pytest.raises(Closed, match="newer"):
        write_fence(wal.store, PATHS, WalId(3), claimed, refresh=refresh)
    assert PATHS.wal(WalId(9)) not in [meta.path for meta in wal.memory.list("db/wal")]
