"""Sequenced objects: finding the latest version, committing the next, and the stalled writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from flagstone.errors import CorruptData, InternalError, InvalidRequest, TransactionConflict, Unavailable
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.integrity import seal_metadata
from flagstone.metadata.manifest import Manifest, new_manifest
from flagstone.metadata.manifest_codec import encode_manifest
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMeta, ObjectMissing, ObjectVersion, StoredObject
from flagstone.types import ManifestId
from kit.faults import InterposingStore

PATHS = DbPaths("db")


def path(number: int) -> str:
    return PATHS.manifest(ManifestId(number))


def next_epoch(now: Versioned[Manifest]) -> Manifest:
    return replace(now.value, writer_epoch=now.value.writer_epoch + 1)


def grow_to(manifests: ManifestStore, last: int) -> None:
    if manifests.latest() is None:
        manifests.create_next(new_manifest(), None)
    while manifests.require_latest().id < last:
        manifests.update(next_epoch)


def collect(manifests: ManifestStore, upto: int) -> None:
    manifests.advance_boundary(upto)
    manifests.delete(range(1, upto + 1))


def test_a_path_without_versions_has_no_latest_one(manifests: ManifestStore) -> None:
    assert manifests.latest() is None
    with pytest.raises(InvalidRequest, match="no database at"):
        manifests.require_latest()
    with pytest.raises(ObjectMissing):
        manifests.load(1)


def test_versions_count_from_one(manifests: ManifestStore, store: MemoryStore) -> None:
    assert manifests.create_next(new_manifest(), None).id == 1
    assert manifests.update(next_epoch) == Versioned(2, replace(new_manifest(), writer_epoch=1))
    assert [entry.id for entry in manifests.list()] == [1, 2]
    assert [meta.path for meta in store.list("db")] == [path(1), path(2)]


def test_an_edit_without_effect_writes_nothing(manifests: ManifestStore) -> None:
    grow_to(manifests, 2)
    assert manifests.update(lambda now: now.value).id == 2
    assert manifests.update(lambda _: None).id == 2
    assert len(manifests.list()) == 2


def test_files_with_foreign_names_are_ignored(manifests: ManifestStore, store: MemoryStore) -> None:
    grow_to(manifests, 3)
    for name in ("99.manifest", "00000000000000000009.sst", "readme", "00000000000000000009.manifest#1"):
        store.put(f"db/manifest/{name}", b"junk")
    assert [entry.id for entry in manifests.list()] == [1, 2, 3]
    assert ManifestStore(store, PATHS).require_latest().id == 3


@pytest.mark.parametrize("ahead", [1, 2, 3, 4, 5, 20])
def test_a_reader_finds_the_latest_version_however_far_behind_it_is(
    manifests: ManifestStore, store: MemoryStore, ahead: int
) -> None:
    grow_to(manifests, 3)
    reader = ManifestStore(store, PATHS)
    assert reader.require_latest().id == 3
    grow_to(manifests, 3 + ahead)
    assert reader.require_latest() == manifests.require_latest()


def test_reading_the_latest_version_costs_two_requests() -> None:
    store = RecordingStore()
    manifests = ManifestStore(store, PATHS)
    grow_to(manifests, 2)
    manifests.require_latest()
    store.taken()
    assert manifests.require_latest().id == 2
    assert store.taken() == [f"get {path(3)}", BOUNDARY]


def test_creating_a_version_that_exists_raises_a_conflict(
    manifests: ManifestStore, store: MemoryStore
) -> None:
    grow_to(manifests, 1)
    base = manifests.require_latest()
    ManifestStore(store, PATHS).update(next_epoch)
    with pytest.raises(TransactionConflict) as caught:
        manifests.create_next(next_epoch(base), base)
    assert isinstance(caught.value, SequencedConflict)


def test_the_edit_is_applied_again_to_the_version_that_won(
    manifests: ManifestStore, store: MemoryStore
) -> None:
    grow_to(manifests, 1)
    other = ManifestStore(store, PATHS)
    seen = []

    def edit(now: Versioned[Manifest]) -> Manifest:
        if not seen:
            other.update(lambda found: replace(found.value, compactor_epoch=5))
        seen.append(now.id)
        return next_epoch(now)

    assert manifests.update(edit) == Versioned(3, replace(new_manifest(), writer_epoch=1, compactor_epoch=5))
    assert seen == [1, 2]


def test_an_update_that_always_loses_raises_unavailable_after_its_timeout(
    manifests: ManifestStore, store: MemoryStore, clock: VirtualClock
) -> None:
    grow_to(manifests, 1)
    other = ManifestStore(store, PATHS)

    def edit(now: Versioned[Manifest]) -> Manifest:
        other.update(next_epoch)
        return replace(now.value, compactor_epoch=now.value.compactor_epoch + 1)

    with pytest.raises(Unavailable, match="lost every race"):
        manifests.update(edit, timeout_s=5)
    assert clock.monotonic() >= 5


def test_an_edit_that_violates_a_rule_writes_nothing(manifests: ManifestStore) -> None:
    grow_to(manifests, 3)
    with pytest.raises(InternalError, match="counters_grow"):
        manifests.update(lambda now: replace(now.value, writer_epoch=0))
    assert len(manifests.list()) == 3


def test_a_damaged_version_raises_corrupt_data_with_its_object(
    manifests: ManifestStore, store: MemoryStore
) -> None:
    grow_to(manifests, 1)
    store.put(path(2), b"\0\7junk")
    with pytest.raises(CorruptData, match="version 7") as caught:
        manifests.latest()
    assert caught.value.object == path(2)


def test_a_reader_that_slept_skips_collected_versions(manifests: ManifestStore, store: MemoryStore) -> None:
    grow_to(manifests, 3)
    sleeper = ManifestStore(store, PATHS)
    assert sleeper.require_latest().id == 3
    grow_to(manifests, 10)
    collect(manifests, 9)
    assert sleeper.require_latest().id == 10


def test_without_a_boundary_a_reader_that_slept_lists_after_a_minute(
    manifests: ManifestStore, store: MemoryStore, clock: VirtualClock
) -> None:
    grow_to(manifests, 3)
    sleeper = ManifestStore(store, PATHS, clock=clock)
    assert sleeper.require_latest().id == 3
    grow_to(manifests, 10)
    manifests.delete(range(1, 10), bounded=False)
    clock.sleep(61)
    assert sleeper.require_latest().id == 10


def test_deleting_beyond_the_boundary_is_refused(manifests: ManifestStore) -> None:
    grow_to(manifests, 5)
    manifests.advance_boundary(2)
    with pytest.raises(InternalError, match="beyond the boundary"):
        manifests.delete([1, 2, 3])
    assert len(manifests.list()) == 5
    manifests.delete([1, 2])
    assert [entry.id for entry in manifests.list()] == [3, 4, 5]
    assert manifests.read_boundary() == 2


@pytest.mark.parametrize("boundary", [3, 4, 2**64 - 1])
def test_a_boundary_that_no_version_exceeds_raises_corrupt_data(
    manifests: ManifestStore, store: MemoryStore, boundary: int
) -> None:
    grow_to(manifests, 3)
    store.put(PATHS.boundary("manifest"), b"%d" % boundary)
    for reader in (manifests, ManifestStore(store, PATHS)):
        with pytest.raises(CorruptData, match=f"boundary is {boundary}") as caught:
            reader.latest()
        assert caught.value.object == PATHS.boundary("manifest")


def test_a_boundary_without_any_version_raises_corrupt_data(
    manifests: ManifestStore, store: MemoryStore
) -> None:
    store.put(PATHS.boundary("manifest"), b"1")
    with pytest.raises(CorruptData, match="missing"):
        manifests.latest()


def stalled_writer(store: MemoryStore) -> tuple[ManifestStore, Versioned[Manifest]]:
    """A writer that read version 3 and stalled; versions 4 to 9 are collected, and 10 is the latest."""
    manifests = ManifestStore(store, PATHS)
    grow_to(manifests, 3)
    stalled = ManifestStore(store, PATHS)
    base = stalled.require_latest()
    grow_to(manifests, 10)
    collect(manifests, 9)
    return stalled, base


def test_a_stalled_writer_does_not_commit_a_used_id(store: MemoryStore) -> None:
    stalled, base = stalled_writer(store)
    with pytest.raises(SequencedConflict, match="behind the boundary"):
        stalled.create_next(next_epoch(base), base)
    assert stalled.require_latest().id == 10
    assert stalled.update(next_epoch).id == 11


def test_a_reader_ignores_the_version_that_a_stalled_writer_left_behind_the_boundary(
    store: MemoryStore,
) -> None:
    reader = ManifestStore(store, PATHS)
    grow_to(reader, 3)
    stalled, base = stalled_writer(store)
    with pytest.raises(SequencedConflict):
        stalled.create_next(next_epoch(base), base)
    assert store.get(path(4)).data  # it exists, and `reader` finds it when it probes after 3
    assert reader.require_latest().id == 10


def test_without_the_boundary_check_a_stalled_writer_commits(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the two tests above can fail: without the check the stale write counts as committed."""
    stalled, base = stalled_writer(store)
    monkeypatch.setattr(Boundary, "admits", lambda self, created_id: True)
    assert stalled.create_next(next_epoch(base), base).id == 4


def test_a_commit_raises_if_the_boundary_cannot_be_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = ManifestStore(store, PATHS)
    grow_to(manifests, 1)
    base = manifests.require_latest()

    def down(self: Boundary) -> int:
        raise Unavailable("no answer")

    monkeypatch.setattr(Boundary, "read", down)
    with pytest.raises(Unavailable):
        manifests.create_next(next_epoch(base), base)


def test_the_latest_version_is_found_although_listed_ones_are_collected_before_they_are_read(
    store: MemoryStore,
) -> None:
    manifests = ManifestStore(store, PATHS)
    grow_to(manifests, 3)

    def grow_and_collect() -> None:
        grow_to(manifests, 4)
        collect(manifests, 3)

    racing = InterposingStore(store, grow_and_collect, op="list", after=True)
    assert ManifestStore(racing, PATHS).require_latest().id == 4


def test_racing_threads_lose_no_update(store: MemoryStore) -> None:
    grow_to(ManifestStore(store, PATHS), 1)
    threads, rounds = 6, 25
    won: list[int] = []

    def work() -> None:
        manifests = ManifestStore(store, PATHS)
        won.extend(manifests.update(next_epoch).id for _ in range(rounds))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(won) == list(range(2, 2 + threads * rounds))
    assert ManifestStore(store, PATHS).require_latest().value.writer_epoch == threads * rounds


def test_threads_that_share_a_manifest_store_lose_no_update(store: MemoryStore) -> None:
    manifests = ManifestStore(store, PATHS)
    grow_to(manifests, 1)
    workers = [
        threading.Thread(target=lambda: [manifests.update(next_epoch) for _ in range(25)]) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert manifests.require_latest().value.writer_epoch == 100


def test_a_version_is_stored_as_encoded_with_a_checksum(manifests: ManifestStore, store: MemoryStore) -> None:
    grow_to(manifests, 2)
    assert store.get(path(2)).data == seal_metadata(encode_manifest(manifests.load(2)), path(2))


class RecordingStore(MemoryStore):
    """Records every get, list and create."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def get(self, path: str) -> StoredObject:
        self.calls.append(f"get {path}")
        return super().get(path)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        self.calls.append(f"list {prefix}")
        return super().list(prefix, after=after)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        self.calls.append(f"put {path}")
        return super().put_if_absent(path, data, token=token)

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


BOUNDARY = "get db/gc/manifest.boundary"


def test_polling_costs_one_request_and_once_a_minute_two(clock: VirtualClock) -> None:
    store = RecordingStore()
    manifests = ManifestStore(store, PATHS, clock=clock)
    grow_to(manifests, 2)
    store.taken()
    asked = []
    for _ in range(14):
        clock.sleep(10)
        assert manifests.poll().id == 2
        asked.append(store.taken())
    assert asked.count([f"get {path(3)}"]) == 12
    assert asked.count([f"get {path(3)}", BOUNDARY]) == 2


def test_a_poll_that_finds_a_new_version_reads_the_boundary(clock: VirtualClock) -> None:
    store = RecordingStore()
    manifests, other = ManifestStore(store, PATHS, clock=clock), ManifestStore(store, PATHS, clock=clock)
    grow_to(manifests, 2)
    other.update(next_epoch)
    store.taken()
    assert manifests.poll().id == 3
    assert BOUNDARY in store.taken()
    assert manifests.poll() == other.require_latest()


def test_a_poll_after_a_suspension_finds_the_latest_version_behind_a_gap(
    manifests: ManifestStore, store: MemoryStore, clock: VirtualClock
) -> None:
    grow_to(manifests, 3)
    sleeper = ManifestStore(store, PATHS, clock=clock)
    assert sleeper.poll().id == 3
    grow_to(manifests, 10)
    manifests.delete(range(1, 10), bounded=False)
    clock.shift_wall(61_000)  # as after a suspension: only the wall clock advances
    assert sleeper.poll().id == 10


def test_an_update_of_our_own_recent_version_reads_no_version_first(clock: VirtualClock) -> None:
    store = RecordingStore()
    manifests = ManifestStore(store, PATHS, clock=clock)
    grow_to(manifests, 2)
    store.taken()
    clock.sleep(30)
    assert manifests.update(next_epoch).id == 3
    assert store.taken() == [f"put {path(3)}", BOUNDARY]
    clock.sleep(61)
    assert manifests.update(next_epoch).id == 4
    assert store.taken()[0].startswith("list"), "too long ago to assume that it is the latest"


def test_a_version_of_another_process_is_assumed_to_be_current_for_a_moment(clock: VirtualClock) -> None:
    store = RecordingStore()
    grow_to(ManifestStore(store, PATHS), 2)
    manifests = ManifestStore(store, PATHS, clock=clock)
    manifests.require_latest()
    store.taken()
    assert manifests.update(next_epoch).id == 3
    assert store.taken() == [f"put {path(3)}", BOUNDARY]
    grow_to(ManifestStore(store, PATHS), 4)
    manifests.require_latest()
    clock.sleep(2)
    store.taken()
    assert manifests.update(next_epoch).id == 5
    assert store.taken() == [f"get {path(5)}", BOUNDARY, f"put {path(5)}", BOUNDARY]


def test_an_edit_that_refuses_or_changes_nothing_is_repeated_on_the_latest_version(
    manifests: ManifestStore, store: MemoryStore
) -> None:
    grow_to(manifests, 2)
    ManifestStore(store, PATHS).update(lambda now: replace(now.value, compactor_epoch=7))
    seen = []

    def only_after_a_claim(now: Versioned[Manifest]) -> Manifest:
        seen.append(now.id)
        if not now.value.compactor_epoch:
            raise InvalidRequest("the role is not claimed")
        return next_epoch(now)

    assert manifests.update(only_after_a_claim).id == 4
    assert seen == [2, 3]
    ManifestStore(store, PATHS).update(lambda now: replace(now.value, compactor_epoch=8))
    found = manifests.update(lambda now: None if now.value.compactor_epoch == 7 else next_epoch(now))
    assert (found.id, found.value.compactor_epoch) == (6, 8)
