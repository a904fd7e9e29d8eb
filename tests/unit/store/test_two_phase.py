"""The two-phase store without crashes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.store.commit_log import CommitRecord, RecordState
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectVersion
from flagstone.store.two_phase import TwoPhaseStore
from kit.two_phase import Crash, Stepped, TwoPhaseWorld

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TwoPhaseWorld]:
    world = TwoPhaseWorld(SqliteCommitLog(tmp_path / "commits.db", synchronous="OFF"), clock=VirtualClock())
    yield world
    world.log.close()


def test_a_created_object_is_in_the_base_under_its_own_name(world: TwoPhaseWorld) -> None:
    store = world.process()
    version = store.put_if_absent("wal/1", b"one", token="t1")
    assert world.base.contents() == {"wal/1": b"one"}
    assert world.base.temporaries() == []
    assert store.get("wal/1").data == b"one"
    assert store.head("wal/1").version == version
    assert store.head("wal/1").token == "t1"
    assert store.get_if_changed("wal/1", version) is None


def test_a_second_creator_is_refused_and_leaves_nothing(world: TwoPhaseWorld) -> None:
    world.process().put_if_absent("wal/1", b"one")
    with pytest.raises(ObjectExists):
        world.process().put_if_absent("wal/1", b"two")
    assert world.base.contents() == {"wal/1": b"one"}
    assert world.base.temporaries() == []


def test_an_object_without_a_commit_record_is_not_created_again(world: TwoPhaseWorld) -> None:
    world.base.put("manifest/1", b"old")
    with pytest.raises(ObjectExists):
        world.process().put_if_absent("manifest/1", b"new")
    assert world.process().get("manifest/1").data == b"old"


def test_an_object_without_a_record_can_be_updated_in_place_once_per_version(world: TwoPhaseWorld) -> None:
    world.base.put("gc/boundary", b"0")
    store = world.process()
    seen = store.get("gc/boundary").meta.version
    store.put_if_match("gc/boundary", b"1", seen)
    with pytest.raises(ObjectChanged):
        store.put_if_match("gc/boundary", b"2", seen)
    assert store.get("gc/boundary").data == b"1"


def test_updates_in_place_keep_only_the_source_of_the_current_version(world: TwoPhaseWorld) -> None:
    store = world.process()
    version = store.put_if_absent("gc/boundary", b"0")
    for number in range(1, 4):
        stale = version
        version = store.put_if_match("gc/boundary", str(number).encode(), version, token=f"t{number}")
        with pytest.raises(ObjectChanged):
            store.put_if_match("gc/boundary", b"stale", stale)
        assert store.get("gc/boundary").data == str(number).encode()
        assert store.get_if_changed("gc/boundary", version) is None
        changed = store.get_if_changed("gc/boundary", stale)
        assert changed is not None
        assert changed.meta.token == f"t{number}"
        assert world.base.contents() == {"gc/boundary": str(number).encode()}
        assert len(world.base.temporaries()) == 1
    assert [meta.path for meta in store.list("gc")] == ["gc/boundary"]
    world.check_settled()


def test_put_if_match_of_a_missing_object_is_refused(world: TwoPhaseWorld) -> None:
    with pytest.raises(ObjectChanged):
        world.process().put_if_match("gc/boundary", b"1", ObjectVersion(etag="x"))


def test_a_version_never_comes_back_although_the_bytes_do(world: TwoPhaseWorld) -> None:
    store = world.process()
    first = store.put_if_absent("gc/boundary", b"same")
    second = store.put_if_match("gc/boundary", b"same", first)
    assert second != first
    with pytest.raises(ObjectChanged):
        store.put_if_match("gc/boundary", b"other", first)


def test_a_deleted_path_is_refused_to_creators_until_its_record_is_forgotten(world: TwoPhaseWorld) -> None:
    store = world.process()
    store.put_if_absent("wal/1", b"one")
    store.delete("wal/1")
    assert world.base.contents() == {}
    with pytest.raises(ObjectMissing):
        store.get("wal/1")
    with pytest.raises(ObjectExists):
        store.put_if_absent("wal/1", b"late")
    assert store.collect_garbage().records == []
    world.clock.sleep(DAY_MS / 1000)
    assert store.collect_garbage(dry_run=True).records == ["wal/1"]
    assert store.collect_garbage().records == ["wal/1"]
    assert store.put_if_absent("wal/1", b"again")


def test_a_plain_put_replaces_what_was_written_conditionally_or_deleted(world: TwoPhaseWorld) -> None:
    store = world.process()
    first = store.put_if_absent("wal/1", b"one")
    store.put("wal/1", b"two")
    assert store.get("wal/1").data == b"two"
    with pytest.raises(ObjectChanged):
        store.put_if_match("wal/1", b"three", first)
    store.delete("wal/1")
    store.put("wal/1", b"four")
    assert store.get("wal/1").data == b"four"
    assert [meta.path for meta in store.list("")] == ["wal/1"]
    world.check_settled()


def test_a_plain_put_to_a_new_path_needs_no_temporary(world: TwoPhaseWorld) -> None:
    calls: list[str] = []
    store = world.process(lambda name, moment: calls.append(name) if moment == "before" else None)
    store.put("compacted/a", b"table")
    assert calls == ["find", "put"]


def test_range_reads_do_not_read_the_commit_log(world: TwoPhaseWorld) -> None:
    world.process().put_if_absent("wal/1", b"0123456789")
    calls: list[str] = []
    store = world.process(lambda name, moment: calls.append(name) if moment == "before" else None)
    assert store.get_range("wal/1", 2, 4) == b"23"
    assert store.get_ranges("wal/1", [(0, 1), (8, 12)]) == [b"0", b"89"]
    assert store.get_tail("wal/1", 3).data == b"789"
    assert calls == ["get_range", "get_ranges", "get_tail"]


def test_copy_reads_the_current_version_and_respects_the_record_of_its_target(world: TwoPhaseWorld) -> None:
    store = world.process()
    version = store.put_if_absent("a", b"1")
    store.copy("a", "b")
    store.put_if_match("a", b"2", version)
    store.copy("a", "c")
    taken = store.put_if_absent("d", b"x")
    store.copy("a", "d")
    assert [store.get(path).data for path in "abcd"] == [b"2", b"1", b"2", b"2"]
    with pytest.raises(ObjectChanged):
        store.put_if_match("d", b"y", taken)


def test_deleting_many_deletes_those_with_and_without_a_record(world: TwoPhaseWorld) -> None:
    store = world.process()
    store.put("compacted/a", b"table")
    store.put_if_absent("wal/1", b"one")
    store.put_if_match("wal/1", b"two", store.head("wal/1").version)
    store.delete_many(["compacted/a", "wal/1", "never"])
    assert list(store.list("")) == []
    assert list(world.base.list("")) == []


def test_names_in_the_form_of_temporaries_are_refused(world: TwoPhaseWorld) -> None:
    name = "wal/1.0b8f8a44-3d53-4c5f-8f1e-0d1f6a3b5c77.0123456789abcdef"
    store = world.process()
    for write in (store.put, store.put_if_absent):
        with pytest.raises(InvalidRequest, match="form of a temporary"):
            write(name, b"")


def test_an_in_flight_copy_of_an_old_version_is_never_read_and_is_repaired(world: TwoPhaseWorld) -> None:
    store = world.process()
    first = store.put_if_absent("gc/boundary", b"1")
    second = store.put_if_match("gc/boundary", b"2", first)

    class LateCopies(Stepped):
        """Reads the source, lets another process replace the object, and only then writes the destination."""

        def copy(self, source: str, destination: str) -> None:
            data = self._target.get(source).data
            if data == b"3":
                newer = world.process()
                newer.put_if_match("gc/boundary", b"4", newer.head("gc/boundary").version)
                self._target.put(destination, data)
                assert newer.get("gc/boundary").data == b"4"
                assert world.base.contents() == {"gc/boundary": b"3"}
            else:
                self._target.put(destination, data)

    slow = TwoPhaseStore(LateCopies(world.base, lambda *_: None), world.log)  # type: ignore[arg-type]
    slow.put_if_match("gc/boundary", b"3", second)
    assert world.base.contents() == {"gc/boundary": b"4"}
    world.check_settled()


def test_an_in_flight_copy_does_not_bring_back_a_deleted_object(world: TwoPhaseWorld) -> None:
    class LateCopies(Stepped):
        def copy(self, source: str, destination: str) -> None:
            data = self._target.get(source).data
            other = world.process()
            assert other.get(destination).data == b"one"
            other.delete(destination)
            self._target.put(destination, data)
            with pytest.raises(ObjectMissing):
                other.get(destination)

    slow = TwoPhaseStore(LateCopies(world.base, lambda *_: None), world.log)  # type: ignore[arg-type]
    slow.put_if_absent("wal/1", b"one")
    assert list(world.base.list("")) == []


def test_an_outdated_destination_left_by_a_crash_is_repaired_by_recovery(world: TwoPhaseWorld) -> None:
    store = world.process()
    store.put_if_match("gc/boundary", b"2", store.put_if_absent("gc/boundary", b"1"))
    world.base.put("gc/boundary", b"1")
    assert store.get("gc/boundary").data == b"2"
    assert store.recover().repaired == ["gc/boundary"]
    assert world.base.contents() == {"gc/boundary": b"2"}
    assert store.recover().repaired == []


def test_collection_keeps_young_temporaries_and_sources_of_current_versions(world: TwoPhaseWorld) -> None:
    store = world.process()
    store.put_if_match("gc/boundary", b"2", store.put_if_absent("gc/boundary", b"1"))
    [kept] = world.base.temporaries()
    orphan = "wal/1.0b8f8a44-3d53-4c5f-8f1e-0d1f6a3b5c77.0123456789abcdef"
    world.base.put(orphan, b"never decided")
    assert store.collect_garbage().temporaries == []
    world.clock.sleep(DAY_MS / 1000)
    assert store.collect_garbage(dry_run=True).temporaries == [orphan]
    assert world.base.temporaries() == [kept, orphan]
    assert store.collect_garbage().temporaries == [orphan]
    assert world.base.temporaries() == [kept]


def test_a_writer_whose_temporary_was_collected_writes_it_again(world: TwoPhaseWorld) -> None:
    def collect_while_stalled(name: str, moment: str) -> None:
        if (name, moment) == ("insert", "before"):
            world.process().collect_garbage(min_age_ms=0)

    world.process(collect_while_stalled).put_if_absent("wal/1", b"one")
    assert world.process().get("wal/1").data == b"one"
    world.check_settled()


def test_a_decided_write_without_its_source_is_reported_as_damage(world: TwoPhaseWorld) -> None:
    record = CommitRecord("wal/1", "wal/1.gone", 1, RecordState.PENDING, 0)
    assert world.log.insert(record)
    with pytest.raises(CorruptData, match="gone"):
        world.process().get("wal/1")
    assert world.process().recover().broken == ["wal/1"]


def test_a_create_that_is_decided_after_its_writer_is_gone_frees_the_path_again(world: TwoPhaseWorld) -> None:
    # A request to the commit log arrived days later: garbage collection reported the path for ever, and a process that
    # created it got `CorruptData` (world 1000032 of the simulation).
    def arrive_late(name: str, moment: str) -> None:
        if (name, moment) == ("insert", "before"):
            world.process().collect_garbage(min_age_ms=0)
        if (name, moment) == ("insert", "after"):
            raise Crash("the process is gone")

    with pytest.raises(Crash):
        world.process(arrive_late).put_if_absent("wal/1", b"one")
    store = world.process()
    assert store.recover().broken == ["wal/1"]
    assert store.collect_garbage().void == [], "its writer may still be there"
    world.clock.sleep(DAY_MS / 1000)
    assert store.collect_garbage(dry_run=True).void == ["wal/1"]
    assert store.collect_garbage().void == ["wal/1"]
    assert store.recover().broken == []
    with pytest.raises(ObjectMissing):
        store.get("wal/1")
    with pytest.raises(ObjectExists):
        store.put_if_absent("wal/1", b"two")
    world.clock.sleep(DAY_MS / 1000)
    assert store.collect_garbage().records == ["wal/1"]
    store.put_if_absent("wal/1", b"two")
    assert store.get("wal/1").data == b"two"
    world.check_settled()


def test_a_writer_does_not_acknowledge_a_create_that_was_given_up_while_it_staged_it_again(
    world: TwoPhaseWorld,
) -> None:
    puts = []

    def collect(name: str, moment: str) -> None:
        if name == "put" and moment == "before":
            puts.append(name)
        if (name, moment) == ("insert", "before") or (
            name == "put" and moment == "before" and len(puts) == 2
        ):
            world.process().collect_garbage(min_age_ms=0)

    with pytest.raises(Unavailable, match="given the create up"):
        world.process(collect).put_if_absent("wal/1", b"one")
    assert len(puts) == 2
    with pytest.raises(ObjectMissing):
        world.process().get("wal/1")
    assert world.base.contents() == {}
    world.check_settled()


def test_a_create_that_was_copied_is_completed_although_its_temporary_is_gone(world: TwoPhaseWorld) -> None:
    def crash(name: str, moment: str) -> None:
        if (name, moment) == ("replace", "before"):
            raise Crash("copied, not yet committed")

    with pytest.raises(Crash):
        world.process(crash).put_if_absent("wal/1", b"one")
    [temporary] = world.base.temporaries()
    world.base.delete(temporary)  # by a collector that had listed it before the decision
    world.clock.sleep(DAY_MS / 1000)
    assert world.process().collect_garbage().void == []
    assert world.process().recover().completed == ["wal/1"]
    assert world.process().get("wal/1").data == b"one"
    world.check_settled()


def test_a_create_succeeds_although_the_answer_of_the_commit_log_was_lost(world: TwoPhaseWorld) -> None:
    class LostAnswers(Stepped):
        """A client that repeats each insertion, as after a lost answer."""

        def insert(self, record: CommitRecord) -> bool:
            self._target.insert(record)
            return bool(self._target.insert(record))

    store = TwoPhaseStore(world.base, LostAnswers(world.log, lambda *_: None))  # type: ignore[arg-type]
    store.put_if_absent("wal/1", b"one")
    assert store.get("wal/1").data == b"one"


def test_four_threads_counting_in_one_object_lose_no_increment(world: TwoPhaseWorld) -> None:
    world.process().put_if_absent("counter", b"0")

    def count(_: int) -> None:
        store = world.process()
        done = 0
        while done < 50:
            seen = store.get("counter")
            try:
                store.put_if_match("counter", str(int(seen.data) + 1).encode(), seen.meta.version)
            except ObjectChanged:
                continue
            done += 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    assert world.process().get("counter").data == b"200"
    assert world.base.contents() == {"counter": b"200"}
    world.check_settled()


def test_an_unpickled_two_phase_store_uses_the_same_base_and_commit_log(tmp_path: Path) -> None:
    base = MemoryStore.named("two-phase-pickle")
    store = TwoPhaseStore(base, SqliteCommitLog(tmp_path / "commits.db", synchronous="OFF"))
    store.put_if_absent("a", b"1")
    copy = pickle.loads(pickle.dumps(store))
    with pytest.raises(ObjectExists):
        copy.put_if_absent("a", b"2")


def test_a_commit_log_opened_before_a_fork_works_in_both_processes(tmp_path: Path) -> None:
    log = SqliteCommitLog(tmp_path / "commits.db")
    assert log.insert(CommitRecord("parent", "s", 1, RecordState.PENDING, 0))
    child = multiprocessing.get_context("fork").Process(target=_insert_or_die, args=(log, "child"))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert [record.destination for record in log.records("")] == ["child", "parent"]
    assert not log.insert(CommitRecord("child", "other", 1, RecordState.PENDING, 0))
    log.close()


def _insert_or_die(log: SqliteCommitLog, destination: str) -> None:
    won = log.insert(CommitRecord(destination, "s", 1, RecordState.PENDING, 0))
    os._exit(0 if won and log.find("parent") is not None else 1)


def test_a_commit_log_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="folder of the commit log does not exist"):
        SqliteCommitLog(tmp_path / "nowhere" / "commits.db").find("a")
