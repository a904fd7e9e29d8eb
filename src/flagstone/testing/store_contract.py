"""What every object store must do: inherit `StoreContract`, provide the fixture `store`, and run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> ObjectStore:
            return MyStore(...)

Each test uses a folder of its own, so the store may be shared and need not be empty. Class attributes name what
a service is known not to do; everything else is required.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.port import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStore,
    ObjectVersion,
)
from flagstone.testing.upload_contract import UploadContract

_T = TypeVar("_T")

ODD_NAMES = (
    "a b",
    "a%20b",
    "a+b=c&d",
    "a#b",
    "a:b;c,d",
    "a'b(c)!",
    "a~b@c$d",
    "ünï-ço∂é",
    "日本語",
    "🪨",
    "a.b.",
    "...",
)


class StoreRaces:
    """The promises about concurrent callers."""

    objects_are_immutable: ClassVar[bool] = False
    """The store, like a cache, may assume that objects are never replaced while they are read."""
    race_rounds: ClassVar[int] = 50
    racers: ClassVar[int] = 8

    def test_exactly_one_of_several_concurrent_creates_succeeds(
        self, store: ObjectStore, folder: str
    ) -> None:
        with ThreadPoolExecutor(self.racers) as racers:
            for number in range(self.race_rounds):
                path = f"{folder}/{number:06d}"
                outcomes = list(racers.map(partial(_won, store, path), range(self.racers)))

                winners = [name for name, won in enumerate(outcomes) if won]
                assert len(winners) == 1, f"round {number} had winners {winners}"
                assert store.get(path).data == b"%d" % winners[0]

    def test_no_increment_of_a_shared_counter_is_lost(self, store: ObjectStore, folder: str) -> None:
        if self.objects_are_immutable:
            pytest.skip("this store is for objects that never change")
        path, each = f"{folder}/counter", 10
        store.put_if_absent(path, b"0")

        def count() -> None:
            done = 0
            while done < each:
                found = store.get(path)
                try:
                    store.put_if_match(path, b"%d" % (int(found.data) + 1), found.meta.version)
                except ObjectChanged:
                    continue
                done += 1

        together([count] * self.racers, threads=self.racers)

        assert int(store.get(path).data) == each * self.racers

    def test_a_reader_sees_the_old_or_the_new_bytes(self, store: ObjectStore, folder: str) -> None:
        if self.objects_are_immutable:
            pytest.skip("this store is for objects that never change")
        path = f"{folder}/x"
        versions = [bytes([letter]) * size for letter, size in ((65, 70_000), (66, 70_000), (67, 30_000))]
        store.put(path, versions[0])

        def write() -> None:
            for number in range(30):
                store.put(path, versions[number % 3])

        def read() -> None:
            for _ in range(60):
                found = store.get(path)
                assert found.data in versions
                assert found.meta.size == len(found.data)

        together([write, read, read], threads=3)


class StoreContract(StoreRaces, UploadContract):
    """The promises of `flagstone.store.port`, one test each."""

    keeps_tokens: ClassVar[bool] = True
    """`head` returns the token of a conditional write."""
    versions_are_unique: ClassVar[bool] = True
    """False where equal bytes have equal versions (S3): a swap cannot detect a change that was undone."""
    pickles: ClassVar[bool] = True
    many_objects: ClassVar[int] = 1_200

    @pytest.fixture
    def folder(self) -> str:
        return f"contract/{SYSTEM_IDS.token()}"

    def test_get_returns_what_was_put(self, store: ObjectStore, folder: str) -> None:
        version = store.put(f"{folder}/x", b"hello")

        found = store.get(f"{folder}/x")

        assert found.data == b"hello"
        assert type(found.data) is bytes
        assert (found.meta.path, found.meta.size) == (f"{folder}/x", 5)
        assert found.meta.version == version

    def test_put_replaces_and_changes_the_version(self, store: ObjectStore, folder: str) -> None:
        first = store.put(f"{folder}/x", b"one")
        second = store.put(f"{folder}/x", b"three")

        assert store.get(f"{folder}/x").data == b"three"
        assert first != second

    def test_an_object_of_five_megabytes_is_read_back_whole_in_part_and_from_its_end(
        self, store: ObjectStore, folder: str
    ) -> None:
        content = bytes(range(256)) * (5 * 4096) + b"end"
        store.put(f"{folder}/big", content)

        assert store.get(f"{folder}/big").data == content
        assert store.get_range(f"{folder}/big", 5_000_000, 5_000_300) == content[5_000_000:5_000_300]
        assert store.get_tail(f"{folder}/big", 4).data == content[-4:]

    def test_every_method_accepts_an_object_of_zero_bytes(self, store: ObjectStore, folder: str) -> None:
        path = f"{folder}/empty"
        created = store.put_if_absent(path, b"")

        assert store.get(path).data == b""
        assert store.get_if_changed(path, created) is None
        assert store.get_range(path, 0, 10) == b""
        assert store.get_range(path, 0, 0) == b""
        assert store.get_ranges(path, [(0, 4), (2, 9)]) == [b"", b""]
        assert store.get_tail(path, 8).data == b""
        assert store.get_tail(path, 8).meta.size == 0
        assert store.head(path).size == 0
        assert [(found.path, found.size) for found in store.list(folder)] == [(path, 0)]
        store.copy(path, f"{folder}/copy")
        assert store.head(f"{folder}/copy").size == 0
        store.put_if_match(path, b"", store.head(path).version)
        store.put(path, b"")
        store.delete(path)
        with pytest.raises(ObjectMissing):
            store.head(path)

    @pytest.mark.parametrize(
        ("start", "stop", "expected"),
        [
            (0, 10, b"0123456789"),
            (3, 7, b"3456"),
            (0, 1, b"0"),
            (9, 10, b"9"),
            (8, 100, b"89"),
            (10, 20, b""),
            (500, 600, b""),
            (4, 4, b""),
            (10, 10, b""),
        ],
    )
    def test_a_range_excludes_its_stop_and_ends_with_the_object(
        self, store: ObjectStore, folder: str, start: int, stop: int, expected: bytes
    ) -> None:
        store.put(f"{folder}/x", b"0123456789")

        piece = store.get_range(f"{folder}/x", start, stop)

        assert piece == expected
        assert type(piece) is bytes

    @pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4), (-3, -1)])
    def test_negative_and_reversed_ranges_raise_invalid_request(
        self, store: ObjectStore, folder: str, start: int, stop: int
    ) -> None:
        store.put(f"{folder}/x", b"0123456789")

        with pytest.raises(InvalidRequest, match="range"):
            store.get_range(f"{folder}/x", start, stop)
        with pytest.raises(InvalidRequest, match="range"):
            store.get_ranges(f"{folder}/x", [(0, 1), (start, stop)])

    def test_get_ranges_returns_the_pieces_in_the_order_of_the_ranges(
        self, store: ObjectStore, folder: str
    ) -> None:
        content = bytes(range(256)) * 64
        store.put(f"{folder}/x", content)
        ranges = [(9000, 9100), (0, 10), (5, 20), (16_000, 16_384), (16_380, 17_000), (99_000, 99_001)]

        pieces = store.get_ranges(f"{folder}/x", ranges)

        assert pieces == [content[start:stop] for start, stop in ranges]
        assert {type(piece) for piece in pieces} == {bytes}
        assert store.get_ranges(f"{folder}/x", []) == []

    @pytest.mark.parametrize(("length", "expected"), [(3, b"789"), (10, b"0123456789"), (64, b"0123456789")])
    def test_get_tail_returns_at_most_the_whole_object(
        self, store: ObjectStore, folder: str, length: int, expected: bytes
    ) -> None:
        version = store.put(f"{folder}/x", b"0123456789")

        found = store.get_tail(f"{folder}/x", length)

        assert found.data == expected
        assert type(found.data) is bytes
        assert (found.meta.path, found.meta.size, found.meta.version) == (f"{folder}/x", 10, version)

    def test_every_read_of_a_missing_object_raises_object_missing(
        self, store: ObjectStore, folder: str
    ) -> None:
        path = f"{folder}/none"
        readers: list[Callable[[], object]] = [
            lambda: store.get(path),
            lambda: store.get_if_changed(path, ObjectVersion(etag='"x"')),
            lambda: store.get_range(path, 0, 4),
            lambda: store.get_range(path, 2, 2),
            lambda: store.get_ranges(path, [(0, 4)]),
            lambda: store.get_tail(path, 4),
            lambda: store.head(path),
            lambda: store.copy(path, f"{folder}/copy"),
        ]
        for read in readers:
            with pytest.raises(ObjectMissing) as missing:
                read()
            assert missing.value.path == path
        assert list(store.list(folder)) == []

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "a/./b", "a/../b", "..", "nul\0", "\ud800"])
    def test_invalid_paths_raise_invalid_request(self, store: ObjectStore, path: str) -> None:
        with pytest.raises(InvalidRequest):
            store.put(path, b"x")
        with pytest.raises(InvalidRequest):
            store.upload(path)
        with pytest.raises(InvalidRequest):
            store.get(path)

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_paths_with_unusual_characters_are_stored_listed_and_deleted(
        self, store: ObjectStore, folder: str, name: str
    ) -> None:
        path = f"{folder}/{name}/{name}"
        store.put_if_absent(path, b"1")

        assert store.get(path).data == b"1"
        assert [found.path for found in store.list(folder)] == [path]
        assert [found.path for found in store.list(f"{folder}/{name}")] == [path]
        store.delete_many([path])
        assert list(store.list(folder)) == []

    def test_head_returns_size_time_and_version(self, store: ObjectStore, folder: str) -> None:
        version = store.put(f"{folder}/x", b"12345")

        described = store.head(f"{folder}/x")
        listed = next(iter(store.list(folder)))

        assert (described.path, described.size, described.version) == (f"{folder}/x", 5, version)
        assert described.last_modified_ms > 0
        assert (listed.path, listed.size) == (f"{folder}/x", 5)
        # Services round times differently in headers and in listings.
        assert abs(listed.last_modified_ms - described.last_modified_ms) <= 2_000

    def test_list_is_in_ascending_order_of_the_whole_path(self, store: ObjectStore, folder: str) -> None:
        names = ["a/x", "a-b/x", "a.b", "a0", "a/y/z", "b", "a b", "Z", "é", "a/x-1", "日"]
        for name in names:
            store.put(f"{folder}/{name}", b"")

        found = [meta.path for meta in store.list(folder)]

        assert found == sorted(f"{folder}/{name}" for name in names)

    def test_list_matches_whole_segments(self, store: ObjectStore, folder: str) -> None:
        for name in ("in/a", "in/b/c", "inside/d", "in-e", "inn"):
            store.put(f"{folder}/{name}", b"")

        assert [meta.path for meta in store.list(f"{folder}/in")] == [f"{folder}/in/a", f"{folder}/in/b/c"]
        assert list(store.list(f"{folder}/i")) == []
        assert list(store.list(f"{folder}/in/a")) == []

    def test_list_continues_after_a_path(self, store: ObjectStore, folder: str) -> None:
        for name in ("a/1", "a/2", "a-b/1", "b/1", "b/2"):
            store.put(f"{folder}/{name}", b"")
        everything = [meta.path for meta in store.list(folder)]

        for after in (*everything, f"{folder}/a/15", f"{folder}/a", f"{folder}/", f"{folder}/zzz"):
            found = [meta.path for meta in store.list(folder, after=after)]
            assert found == [path for path in everything if path > after]
        assert [meta.path for meta in store.list(f"{folder}/b", after=f"{folder}/a/1")] == everything[-2:]

    def test_list_returns_more_objects_than_one_page(self, store: ObjectStore, folder: str) -> None:
        paths = [f"{folder}/{number:020d}.sst" for number in range(self.many_objects)]
        together([partial(store.put, path, b"") for path in paths])

        assert [meta.path for meta in store.list(folder)] == paths
        assert [meta.path for meta in store.list(folder, after=paths[-3])] == paths[-2:]
        store.delete_many(paths)
        assert list(store.list(folder)) == []

    def test_a_second_create_raises_object_exists_and_changes_nothing(
        self, store: ObjectStore, folder: str
    ) -> None:
        version = store.put_if_absent(f"{folder}/x", b"first")

        with pytest.raises(ObjectExists) as lost:
            store.put_if_absent(f"{folder}/x", b"second")

        assert lost.value.path == f"{folder}/x"
        assert store.get(f"{folder}/x").data == b"first"
        assert store.head(f"{folder}/x").version == version

    def test_create_succeeds_again_after_delete(self, store: ObjectStore, folder: str) -> None:
        store.put_if_absent(f"{folder}/x", b"first")
        store.delete(f"{folder}/x")

        store.put_if_absent(f"{folder}/x", b"second")

        assert store.get(f"{folder}/x").data == b"second"

    def test_put_if_match_replaces_only_the_version_that_was_read(
        self, store: ObjectStore, folder: str
    ) -> None:
        created = store.put_if_absent(f"{folder}/x", b"1")

        swapped = store.put_if_match(f"{folder}/x", b"2", created)

        assert store.get(f"{folder}/x").data == b"2"
        assert store.head(f"{folder}/x").version == swapped
        with pytest.raises(ObjectChanged) as lost:
            store.put_if_match(f"{folder}/x", b"3", created)
        assert lost.value.path == f"{folder}/x"
        assert store.get(f"{folder}/x").data == b"2"
        store.put_if_match(f"{folder}/x", b"4", store.get(f"{folder}/x").meta.version)
        assert store.get(f"{folder}/x").data == b"4"

    def test_put_if_match_of_a_missing_object_raises_object_changed(
        self, store: ObjectStore, folder: str
    ) -> None:
        version = store.put(f"{folder}/x", b"1")
        store.delete(f"{folder}/x")

        with pytest.raises(ObjectChanged):
            store.put_if_match(f"{folder}/x", b"2", version)
        with pytest.raises(ObjectMissing):
            store.head(f"{folder}/x")

    def test_writing_the_same_bytes_again_gives_a_new_version(self, store: ObjectStore, folder: str) -> None:
        if not self.versions_are_unique:
            pytest.skip("equal bytes have equal versions on this service")
        path = f"{folder}/x"
        seen = {store.put_if_absent(path, b"a")}
        for _ in range(20):
            seen.add(store.put_if_match(path, b"b", store.head(path).version))
            seen.add(store.put(path, b"a"))
            store.delete(path)
            seen.add(store.put_if_absent(path, b"a"))

        assert len(seen) == 61
        for stale in seen - {store.head(path).version}:
            with pytest.raises(ObjectChanged):
                store.put_if_match(path, b"c", stale)

    def test_get_if_changed_returns_the_object_only_after_a_change(
        self, store: ObjectStore, folder: str
    ) -> None:
        first = store.put(f"{folder}/x", b"1")

        assert store.get_if_changed(f"{folder}/x", first) is None
        second = store.put(f"{folder}/x", b"22")
        changed = store.get_if_changed(f"{folder}/x", first)
        assert changed is not None
        assert (changed.data, changed.meta.version) == (b"22", second)
        assert store.get_if_changed(f"{folder}/x", changed.meta.version) is None

    def test_copy_replaces_its_destination(self, store: ObjectStore, folder: str) -> None:
        store.put(f"{folder}/from", b"content")
        store.put(f"{folder}/to", b"old")

        store.copy(f"{folder}/from", f"{folder}/to")
        store.copy(f"{folder}/from", f"{folder}/deeper/to")

        assert store.get(f"{folder}/to").data == b"content"
        assert store.get(f"{folder}/deeper/to").data == b"content"
        assert store.get(f"{folder}/from").data == b"content"

    def test_deleting_a_missing_object_succeeds(self, store: ObjectStore, folder: str) -> None:
        store.put(f"{folder}/x", b"")

        store.delete(f"{folder}/none")
        store.delete_many([f"{folder}/none", f"{folder}/x", f"{folder}/deeper/none"])
        store.delete_many([])

        assert list(store.list(folder)) == []

    def test_delete_many_deletes_three_hundred_objects_and_keeps_the_others(
        self, store: ObjectStore, folder: str
    ) -> None:
        paths = [f"{folder}/{number:04d}" for number in range(300)]
        together([partial(store.put, path, b"x") for path in paths])
        store.put(f"{folder}/kept", b"")

        store.delete_many(iter([*paths, f"{folder}/none"]))

        assert [meta.path for meta in store.list(folder)] == [f"{folder}/kept"]

    def test_head_returns_the_token_of_the_last_conditional_write(
        self, store: ObjectStore, folder: str
    ) -> None:
        if not self.keeps_tokens:
            pytest.skip("this store keeps no tokens")
        tokens = [SYSTEM_IDS.token() for _ in range(3)]
        created = store.put_if_absent(f"{folder}/x", b"", token=tokens[0])

        assert store.head(f"{folder}/x").token == tokens[0]
        store.put_if_match(f"{folder}/x", b"1", created, token=tokens[1])
        assert store.head(f"{folder}/x").token == tokens[1]
        with pytest.raises(ObjectExists):
            store.put_if_absent(f"{folder}/x", b"2", token=tokens[2])
        assert store.head(f"{folder}/x").token == tokens[1]
        store.put(f"{folder}/x", b"3")
        assert store.head(f"{folder}/x").token not in tokens

    def test_a_pickled_store_sees_the_same_objects(self, store: ObjectStore, folder: str) -> None:
        if not self.pickles:
            pytest.skip("this store does not pickle")
        store.put(f"{folder}/x", b"here")

        arrived: ObjectStore = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes

        assert arrived.url == store.url
        assert arrived.get(f"{folder}/x").data == b"here"


def together(calls: list[Callable[[], _T]], *, threads: int = 8) -> list[_T]:
    """The results of all calls, made by that many threads."""
    with ThreadPoolExecutor(threads) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def _won(store: ObjectStore, path: str, name: int) -> bool:
    try:
        store.put_if_absent(path, b"%d" % name)
    except ObjectExists:
        return False
    return True
