"""The checksums that we append to manifests, compactions files and boundaries."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from flagstone.errors import CorruptData
from flagstone.metadata.boundary import Boundary, decode_boundary, encode_boundary
from flagstone.metadata.compactions import Compactions, encode_compactions, load_compactions
from flagstone.metadata.integrity import TRAILER_BYTES, seal_metadata
from flagstone.metadata.manifest import Checkpoint, add_checkpoint, new_manifest
from flagstone.metadata.manifest_codec import encode_manifest, load_manifest
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import ManifestId, Seq, WalId

PATHS = DbPaths("db")
PATH = PATHS.manifest(ManifestId(7))
MANIFEST = replace(
    new_manifest(),
    writer_epoch=3,
    last_l0_seq=Seq(300),
    replay_after_wal_id=WalId(7),
    wal_id_last_seen=WalId(9),
)
STORED = seal_metadata(encode_manifest(MANIFEST), PATH)


def test_every_flipped_bit_of_our_manifest_raises_corrupt_data() -> None:
    assert load_manifest(STORED, PATH) == MANIFEST
    for bit in range(8 * len(STORED)):
        damaged = bytearray(STORED)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptData) as caught:
            load_manifest(bytes(damaged), PATH)
        assert caught.value.object == PATH
        assert caught.value.offset is not None


def test_every_truncated_manifest_raises_corrupt_data_or_lacks_only_its_checksum() -> None:
    for kept in range(len(STORED)):
        try:
            assert load_manifest(STORED[:kept], PATH) == MANIFEST
        except CorruptData:
            continue
        assert len(STORED) - TRAILER_BYTES - 4 < kept <= len(STORED) - TRAILER_BYTES


def test_every_manifest_with_a_zeroed_end_raises_corrupt_data() -> None:
    for kept in range(len(STORED)):
        zeroed = STORED[:kept] + bytes(len(STORED) - kept)
        with pytest.raises(CorruptData):
            load_manifest(zeroed, PATH)


def test_a_manifest_under_the_name_of_another_version_raises_corrupt_data() -> None:
    assert load_manifest(STORED, "elsewhere/manifest/00000000000000000007.manifest") == MANIFEST
    with pytest.raises(CorruptData, match="another object under this name"):
        load_manifest(STORED, PATHS.manifest(ManifestId(8)))


def test_metadata_without_a_checksum_is_read() -> None:
    assert load_manifest(encode_manifest(MANIFEST), PATH) == MANIFEST
    assert load_compactions(encode_compactions(Compactions(4)), "x") == Compactions(4)


def test_a_manifest_knows_whether_it_or_the_one_it_was_edited_from_was_read_with_a_checksum() -> None:
    assert load_manifest(STORED, PATH).checked
    unchecked = load_manifest(encode_manifest(MANIFEST), PATH)
    assert not unchecked.checked
    assert not add_checkpoint(unchecked, Checkpoint(UUID(int=1), ManifestId(7), 0)).checked


def test_manifests_and_compactions_files_are_written_with_a_checksum() -> None:
    store = MemoryStore()
    manifests, compactions = ManifestStore(store, PATHS), CompactionsStore(store, PATHS)
    manifests.create_next(new_manifest(), None)
    compactions.create_next(Compactions(1), None)
    for path in (PATHS.manifest(ManifestId(1)), "db/compactions/00000000000000000001.compactions"):
        stored = bytearray(store.get(path).data)
        stored[8] ^= 1
        store.put(path, bytes(stored))
    for objects in (ManifestStore(store, PATHS), CompactionsStore(store, PATHS)):
        with pytest.raises(CorruptData, match="checksum"):
            objects.latest()


@pytest.mark.parametrize("value", [0, 7, 123456789, 2**64 - 1])
def test_a_boundary_is_readable_by_slatedb_and_every_flipped_bit_raises_corrupt_data(value: int) -> None:
    stored = encode_boundary(value)
    assert int(stored.strip()) == value, "what SlateDB reads"
    assert decode_boundary(stored, "b") == value
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptData):
            decode_boundary(bytes(damaged), "b")
    for cut in range(1, len(stored)):
        for part in (stored[cut:], stored[:cut]):
            with pytest.raises(CorruptData):
                decode_boundary(part, "b")


def test_a_boundary_with_a_wrong_checksum_raises_corrupt_data() -> None:
    store = MemoryStore()
    Boundary(store, "b").advance(12)
    store.put("b", store.get("b").data.replace(b"12", b"92"))
    with pytest.raises(CorruptData, match="checksum of the boundary 92"):
        Boundary(store, "b").read()
