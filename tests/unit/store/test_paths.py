from __future__ import annotations

import pickle

import pytest

from flagstone.errors import InvalidRequest
from flagstone.store.paths import DbPaths, folder_of
from flagstone.types import CompactionsId, ManifestId, Ulid, WalId

PATHS = DbPaths("some/db")
ULID = Ulid(0x0123456789ABCDEF0123456789ABCDEF)


def test_object_names_are_those_of_slatedb() -> None:
    assert PATHS.manifest(ManifestId(1)) == "some/db/manifest/00000000000000000001.manifest"
    assert PATHS.compactions(CompactionsId(2)) == "some/db/compactions/00000000000000000002.compactions"
    assert PATHS.wal(WalId(2**64 - 1)) == "some/db/wal/18446744073709551615.sst"
    assert PATHS.sst(ULID) == "some/db/compacted/014D2PF2DBSQQG28T5CY4TQKFF.sst"
    assert PATHS.boundary("manifest") == "some/db/gc/manifest.boundary"
    assert PATHS.boundary("compactions") == "some/db/gc/compactions.boundary"


def test_parsing_an_object_name_returns_its_id() -> None:
    for paths in (PATHS, DbPaths("")):
        assert paths.parse_manifest(paths.manifest(ManifestId(7))) == 7
        assert paths.parse_compactions(paths.compactions(CompactionsId(7))) == 7
        assert paths.parse_wal(paths.wal(WalId(2**64 - 1))) == 2**64 - 1
        assert paths.parse_sst(paths.sst(ULID)) == ULID
        assert paths.parse_boundary(paths.boundary("manifest")) == "manifest"
        assert paths.parse_boundary(paths.boundary("compactions")) == "compactions"


@pytest.mark.parametrize(
    "name",
    [
        "1.sst",
        "0000000000000000001.sst",
        "000000000000000000001.sst",
        "00000000000000000001.SST",
        "00000000000000000001.sst#1",
        "00000000000000000001.sst\n",
        "00000000000000000001.manifest",
        "00000000000000000001",
        "+0000000000000000001.sst",
        "٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠١.sst",
        "99999999999999999999.sst",
        "deeper/00000000000000000001.sst",
    ],
)
def test_parsing_a_foreign_wal_name_returns_none(name: str) -> None:
    assert PATHS.parse_wal(f"some/db/wal/{name}") is None


@pytest.mark.parametrize(
    "name",
    [
        "014D2PF2DBSQQG28T5CY4TQKFF",
        "014d2pf2dbsqqg28t5cy4tqkff.sst",
        "814D2PF2DBSQQG28T5CY4TQKFF.sst",
        "01ID2PF2DBSQQG28T5CY4TQKFF.sst",
        "014D2PF2DBSQQG28T5CY4TQKF.sst",
        "014D2PF2DBSQQG28T5CY4TQKFF.sst#2",
        "00000000000000000001.sst",
    ],
)
def test_parsing_a_foreign_sst_name_returns_none(name: str) -> None:
    assert PATHS.parse_sst(f"some/db/compacted/{name}") is None


def test_names_of_another_database_are_foreign() -> None:
    other = DbPaths("some/db2")
    assert PATHS.parse_wal(other.wal(WalId(1))) is None
    assert PATHS.parse_manifest(PATHS.wal(WalId(1))) is None
    assert PATHS.parse_boundary("some/db/gc/wal.boundary") is None


def test_invalid_roots_and_ids_are_refused() -> None:
    for root in ("/a", "a/", "a//b", "a/../b"):
        with pytest.raises(InvalidRequest):
            DbPaths(root)
    with pytest.raises(InvalidRequest):
        PATHS.wal(WalId(-1))
    with pytest.raises(InvalidRequest):
        PATHS.wal(WalId(2**64))


def test_equal_paths_compare_hash_and_pickle_as_equal() -> None:
    assert pickle.loads(pickle.dumps(PATHS)) == PATHS
    assert len({PATHS, DbPaths("some/db"), DbPaths("x")}) == 2
    assert folder_of(PATHS.sst(ULID)) == "compacted"
    assert folder_of("x") == ""
