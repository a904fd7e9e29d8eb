"""Epochs: the later claim owns the role, and every edit of the earlier owner is refused."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from flagstone.errors import Closed, InternalError
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.fencing import Fence, claim_compactions, claim_compactor, claim_writer
from flagstone.metadata.manifest import Manifest, new_manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths

PATHS = DbPaths("db")


@pytest.fixture(autouse=True)
def _database(manifests: ManifestStore) -> None:
    manifests.create_next(new_manifest(), None)


def touch(now: Versioned[Manifest]) -> Manifest:
    return replace(now.value, last_l0_seq=now.value.last_l0_seq + 1)


def test_each_claim_raises_the_epoch(manifests: ManifestStore) -> None:
    first, _ = claim_writer(manifests)
    second, claimed = claim_writer(manifests)
    assert (first.epoch, second.epoch, claimed.value.writer_epoch) == (1, 2, 2)
    assert claimed.value.compactor_epoch == 0


def test_an_earlier_writer_stays_fenced(manifests: ManifestStore) -> None:
    first, before = claim_writer(manifests)
    manifests.update(first.guard(touch))
    second, _ = claim_writer(manifests)
    with pytest.raises(Closed) as caught:
        manifests.update(first.guard(touch))
    assert caught.value.reason == "fenced"
    with pytest.raises(Closed, match="epoch 2"):
        first.check(before.value)  # not even by an old manifest
    manifests.update(second.guard(touch))
    assert manifests.require_latest().value.last_l0_seq == 2


def test_roles_do_not_fence_each_other(manifests: ManifestStore) -> None:
    writer, _ = claim_writer(manifests)
    compactor, claimed = claim_compactor(manifests)
    writer.check(claimed.value)
    compactor.check(claimed.value)
    assert (claimed.value.writer_epoch, claimed.value.compactor_epoch) == (1, 1)


def test_an_edit_in_flight_is_fenced_when_it_is_applied_again(
    manifests: ManifestStore, store: MemoryStore
) -> None:
    fence, _ = claim_writer(manifests)
    other = ManifestStore(store, PATHS)

    def edit(now: Versioned[Manifest]) -> Manifest:
        claim_writer(other)
        return touch(now)

    with pytest.raises(Closed, match="newer writer"):
        manifests.update(fence.guard(edit))
    assert manifests.require_latest().value.last_l0_seq == 0


def test_a_coordinator_creates_and_claims_the_compactions_file(
    manifests: ManifestStore, compactions: CompactionsStore
) -> None:
    fence, _ = claim_compactor(manifests)
    claimed = claim_compactions(compactions, fence)
    assert claimed == Versioned(2, Compactions(1))
    assert compactions.load(1) == Compactions(0)
    second, _ = claim_compactor(manifests)
    assert claim_compactions(compactions, second) == Versioned(3, Compactions(2))
    with pytest.raises(Closed, match="newer compactor"):
        compactions.update(fence.guard(lambda now: now.value))


def test_a_coordinator_cannot_claim_the_compactions_file_after_a_newer_one(
    manifests: ManifestStore, compactions: CompactionsStore
) -> None:
    slow, _ = claim_compactor(manifests)
    fast, _ = claim_compactor(manifests)
    claim_compactions(compactions, fast)
    with pytest.raises(Closed):
        claim_compactions(compactions, slow)
    with pytest.raises(Closed):
        claim_compactions(compactions, fast)  # one epoch claims the file only once


def test_a_writer_has_no_claim_to_the_compactions_file() -> None:
    with pytest.raises(InternalError):
        Fence("writer", 1).check(Compactions())


def test_of_many_concurrent_claims_the_last_one_owns_the_role(store: MemoryStore) -> None:
    fences: list[Fence] = []

    def work() -> None:
        fences.append(claim_writer(ManifestStore(store, PATHS))[0])

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(fence.epoch for fence in fences) == list(range(1, 9))
    latest = ManifestStore(store, PATHS).require_latest().value
    owners = []
    for fence in fences:
        try:
            fence.check(latest)
        except Closed:
            continue
        owners.append(fence.epoch)
    assert owners == [8]
