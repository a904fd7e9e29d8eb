"""Readers whose checkpoint never expires: `checkpoint_lifetime=None`."""

from __future__ import annotations

import pytest

import flagstone
from flagstone import Admin, InvalidRequest, ReaderSettings
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET

LASTING = ReaderSettings(checkpoint_lifetime=None, manifest_poll_interval="100s")  # type: ignore[arg-type]


def filled(store: MemoryStore, clock: VirtualClock) -> None:
    with flagstone.open("db", store=store, settings=QUIET, clock=clock) as db:
        db.put(b"k", b"1")


def test_the_checkpoint_never_expires_moves_with_the_database_and_is_deleted_on_close() -> None:
    store, clock = MemoryStore(), VirtualClock()
    filled(store, clock)
    admin = Admin("db", store=store, clock=clock)
    with flagstone.open_reader("db", store=store, settings=LASTING, clock=clock) as reader:
        (held,) = admin.checkpoints()
        assert held.expires_s is None
        assert reader.status()["checkpoint_expires_s"] is None
        clock.advance(10**10)
        reader.refresh()
        assert [entry.id for entry in admin.checkpoints()] == [held.id], "it needs no refreshing"
        with flagstone.open("db", store=store, settings=QUIET, clock=clock) as db:
            db.put(b"k", b"2")
        reader.refresh()
        (moved,) = admin.checkpoints()
        assert moved.id != held.id
        assert moved.expires_s is None
        assert reader.get(b"k") == b"2"
    assert admin.checkpoints() == ()


def test_after_a_crash_the_checkpoint_survives_garbage_collection_until_it_is_deleted() -> None:
    store, clock = MemoryStore(), VirtualClock()
    filled(store, clock)
    crashed = flagstone.open_reader("db", store=store, settings=LASTING, clock=clock)
    admin = Admin("db", store=store, clock=clock)
    clock.advance(10**10)
    admin.collect_garbage(min_age="0s")
    (left,) = admin.checkpoints()
    assert str(left.id) == crashed.status()["checkpoint"]
    admin.delete_checkpoint(left.id)
    assert admin.checkpoints() == ()
    # The reader still runs: it finds its checkpoint deleted and creates another.
    crashed.refresh()
    assert len(admin.checkpoints()) == 1
    crashed.close()
    assert admin.checkpoints() == ()


def test_checkpoints_of_as_of_readers_and_feeds_never_expire() -> None:
    store, clock = MemoryStore(), VirtualClock()
    filled(store, clock)
    admin = Admin("db", store=store, clock=clock)
    with flagstone.open_reader("db", store=store, settings=LASTING, clock=clock, as_of=1):
        assert [entry.expires_s for entry in admin.checkpoints()] == [None]
    assert admin.checkpoints() == ()
    with flagstone.open_feed("db", "me", store=store, settings=LASTING, clock=clock):
        assert None in [entry.expires_s for entry in admin.checkpoints()]


def test_no_lifetime_is_none_in_a_dictionary_and_compactor_options_refuse_it() -> None:
    assert LASTING.to_dict()["checkpoint_lifetime"] is None
    assert ReaderSettings.from_dict({"checkpoint_lifetime": None}).checkpoint_lifetime is None
    with pytest.raises(InvalidRequest, match="checkpoint_lifetime"):
        flagstone.config.CompactorOptions(checkpoint_lifetime=None)  # type: ignore[arg-type]
