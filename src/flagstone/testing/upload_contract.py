"""What uploads in parts must do, on every object store. `StoreContract` includes it."""

from __future__ import annotations

import pytest

from flagstone.store.port import ObjectMissing, ObjectStore, UploadLost


class UploadContract:
    """The promises of `flagstone.store.port.Upload`, one test each."""

    def test_an_upload_is_invisible_until_its_commit_and_then_there_as_a_whole(
        self, store: ObjectStore, folder: str
    ) -> None:
        upload = store.upload(f"{folder}/big")
        content = _content(2 * upload.part_bytes + 1000)

        for start, part in _parts(content, upload.part_bytes):
            upload.write(start, part)
            with pytest.raises(ObjectMissing):
                store.head(f"{folder}/big")
        assert list(store.list(folder)) == []
        upload.commit()

        assert store.get(f"{folder}/big").data == content
        assert [(found.path, found.size) for found in store.list(folder)] == [(f"{folder}/big", len(content))]

    @pytest.mark.parametrize("size", [0, 1, 1000])
    def test_an_upload_may_be_smaller_than_a_part(self, store: ObjectStore, folder: str, size: int) -> None:
        upload = store.upload(f"{folder}/x")
        if size:
            upload.write(0, _content(size))
        upload.commit()

        assert store.get(f"{folder}/x").data == _content(size)

    def test_a_repeated_part_and_a_repeated_commit_change_nothing(
        self, store: ObjectStore, folder: str
    ) -> None:
        upload = store.upload(f"{folder}/x")
        content = _content(upload.part_bytes + 10)

        for start, part in _parts(content, upload.part_bytes):
            upload.write(start, part)
            upload.write(start, part)
        upload.commit()
        version = store.head(f"{folder}/x").version
        upload.commit()
        upload.abort()

        found = store.get(f"{folder}/x")
        assert found.data == content
        assert found.meta.version == version

    def test_the_memory_of_a_part_may_be_used_again(self, store: ObjectStore, folder: str) -> None:
        upload = store.upload(f"{folder}/x")
        memory = bytearray(upload.part_bytes)
        for number in range(3):
            memory[:] = bytes([65 + number]) * len(memory)
            with memoryview(memory) as part:
                upload.write(number * len(memory), part)
        memory[:] = bytes(len(memory))
        upload.commit()

        data = store.get(f"{folder}/x").data
        assert data == b"".join(bytes([65 + number]) * len(memory) for number in range(3))

    def test_an_aborted_upload_leaves_no_object_and_keeps_the_old_one(
        self, store: ObjectStore, folder: str
    ) -> None:
        store.put(f"{folder}/old", b"old")
        for name in ("old", "new"):
            upload = store.upload(f"{folder}/{name}")
            upload.write(0, _content(upload.part_bytes))
            upload.abort()
            upload.abort()
            with pytest.raises(UploadLost):
                upload.write(upload.part_bytes, b"more")
            with pytest.raises(UploadLost):
                upload.commit()
        store.upload(f"{folder}/unused").abort()

        assert store.get(f"{folder}/old").data == b"old"
        assert [found.path for found in store.list(folder)] == [f"{folder}/old"]

    def test_an_upload_replaces_an_object(self, store: ObjectStore, folder: str) -> None:
        first = store.put(f"{folder}/x", b"old")
        upload = store.upload(f"{folder}/x")
        content = _content(upload.part_bytes + 1)
        for start, part in _parts(content, upload.part_bytes):
            upload.write(start, part)

        assert store.get(f"{folder}/x").data == b"old"
        upload.commit()

        assert store.get(f"{folder}/x").data == content
        assert store.get_range(f"{folder}/x", 0, 5) == content[:5]
        assert store.head(f"{folder}/x").version != first

    def test_two_uploads_of_one_object_do_not_mix(self, store: ObjectStore, folder: str) -> None:
        one, two = store.upload(f"{folder}/x"), store.upload(f"{folder}/x")
        size = one.part_bytes
        for start in (0, size):
            one.write(start, b"1" * size)
            two.write(start, b"2" * size)
        one.commit()
        assert store.get(f"{folder}/x").data == b"1" * (2 * size)
        two.commit()
        assert store.get(f"{folder}/x").data == b"2" * (2 * size)


def _content(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


def _parts(content: bytes, part_bytes: int) -> list[tuple[int, bytes]]:
    return [(start, content[start : start + part_bytes]) for start in range(0, len(content), part_bytes)]
