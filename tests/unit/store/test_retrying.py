"""Every way in which an answer can get lost, and the result or error that the caller gets."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.port import (
    NotWritten,
    ObjectChanged,
    ObjectExists,
    ObjectMeta,
    ObjectVersion,
    StoredObject,
)
from flagstone.store.retrying import RetryingStore, RetryPolicy

_T = TypeVar("_T")


class PauseClock(VirtualClock):
    """A clock that records how long its user sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        super().sleep(seconds)


class Flaky(MemoryStore):
    """Fails as scripted: "before" the effect, "after" it (the answer is lost), "refused" without effect, or "ok".

    `then` runs once after a scripted failure, as another process does in that moment.
    """

    def __init__(self, *script: str, keeps_tokens: bool = True) -> None:
        super().__init__()
        self.script = deque(script)
        self.reads = deque[str]()
        self.calls: list[str] = []
        self.keeps_tokens = keeps_tokens
        self.then: Callable[[], object] | None = None

    def _scripted(self, verb: str, script: deque[str], act: Callable[[], _T]) -> _T:
        self.calls.append(verb)
        match script.popleft() if script else "ok":
            case "before":
                self._run_then()
                raise Unavailable("503")
            case "refused":
                self._run_then()
                raise NotWritten("disk full")
            case "after":
                act()
                self._run_then()
                raise Unavailable("timed out")
            case _:
                return act()

    def _run_then(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()

    def get(self, path: str) -> StoredObject:
        return self._scripted("get", self.reads, lambda: MemoryStore.get(self, path))

    def head(self, path: str) -> ObjectMeta:
        meta = self._scripted("head", self.reads, lambda: MemoryStore.head(self, path))
        token = meta.token if self.keeps_tokens else None
        return ObjectMeta(meta.path, meta.size, meta.last_modified_ms, meta.version, token)

    def put(self, path: str, data: bytes) -> ObjectVersion:
        return self._scripted("put", self.script, lambda: MemoryStore.put(self, path, data))

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        create = lambda: MemoryStore.put_if_absent(self, path, data, token=token)  # noqa: E731
        return self._scripted("put_if_absent", self.script, create)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        swap = lambda: MemoryStore.put_if_match(self, path, data, version, token=token)  # noqa: E731
        return self._scripted("put_if_match", self.script, swap)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        for number, meta in enumerate(MemoryStore.list(self, prefix, after=after)):
            if number == 2 and self.script:
                self.script.popleft()
                raise Unavailable("connection reset")
            yield meta


@pytest.fixture
def clock() -> PauseClock:
    return PauseClock()


def with_retries(inner: Flaky, clock: PauseClock, **policy: float) -> RetryingStore:
    return RetryingStore(inner, policy=RetryPolicy(**policy), clock=clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize("failure", ["before", "after"])
def test_reads_and_puts_are_repeated_until_they_succeed(
    clock: PauseClock, failure: str, failures: int
) -> None:
    inner = Flaky(*[failure] * failures)
    store = with_retries(inner, clock)

    store.put("x", b"1")
    inner.reads.extend([failure] * failures)

    assert store.get("x").data == b"1"
    assert len(clock.pauses) == 2 * failures


def test_pauses_double_up_to_the_longest_with_jitter(clock: PauseClock) -> None:
    store = with_retries(Flaky(*["before"] * 6), clock, initial_backoff_s=1, max_backoff_s=4, jitter=0.5)

    store.put("x", b"")

    for pause, longest in zip(clock.pauses, [1, 2, 4, 4, 4, 4], strict=True):
        assert longest / 2 <= pause <= longest


def test_after_the_deadline_unavailable_has_attempts_time_and_cause(clock: PauseClock) -> None:
    store = with_retries(
        Flaky(*["before"] * 99), clock, deadline_s=10, initial_backoff_s=1, max_backoff_s=1, jitter=0
    )

    with pytest.raises(
        Unavailable, match=r"^503: put of db/x in memory:// failed after 11 attempts in 10\.0 s"
    ):
        store.put("db/x", b"")


def test_attempts_can_be_bounded(clock: PauseClock) -> None:
    inner = Flaky(*["before"] * 99)

    with pytest.raises(Unavailable, match="after 3 attempts"):
        with_retries(inner, clock, attempts=3).put("x", b"")

    assert inner.calls == ["put"] * 3


def test_invalid_requests_are_not_repeated(clock: PauseClock) -> None:
    with pytest.raises(InvalidRequest):
        with_retries(Flaky(), clock).put("a//b", b"")
    assert clock.pauses == []


def test_a_broken_listing_continues_after_its_last_object(clock: PauseClock) -> None:
    inner = Flaky()
    for number in range(7):
        inner.put(f"f/{number}", b"")
    inner.script.extend(["break"] * 2)

    assert [meta.path for meta in with_retries(inner, clock).list("f")] == [
        f"f/{number}" for number in range(7)
    ]


@pytest.mark.parametrize("content", [b"", b"bytes"])
@pytest.mark.parametrize(
    "script", [["after"], ["before"], ["before", "after"], ["after", "before"], ["refused"]]
)
def test_a_create_whose_answer_was_lost_succeeds(
    clock: PauseClock, script: list[str], content: bytes
) -> None:
    inner = Flaky(*script)

    version = with_retries(inner, clock).put_if_absent("x", content)

    assert MemoryStore.get(inner, "x").meta.version == version
    assert MemoryStore.get(inner, "x").data == content


@pytest.mark.parametrize("script", [["after"], ["before"], ["before", "after"]])
def test_an_update_whose_answer_was_lost_succeeds(clock: PauseClock, script: list[str]) -> None:
    inner = Flaky()
    first = inner.put("x", b"1")
    inner.script.extend(script)

    version = with_retries(inner, clock).put_if_match("x", b"2", first)

    assert MemoryStore.get(inner, "x").meta.version == version
    assert MemoryStore.get(inner, "x").data == b"2"


def test_a_create_that_the_layer_below_repeats_succeeds(clock: PauseClock) -> None:
    class RetriesBlindly(Flaky):
        def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
            super().put_if_absent(path, data, token=token)
            return super().put_if_absent(path, data, token=token)

    inner = RetriesBlindly()

    assert with_retries(inner, clock).put_if_absent("x", b"") == inner.head("x").version


@pytest.mark.parametrize("script", [[], ["refused"]])
def test_a_create_of_an_existing_object_raises_object_exists(clock: PauseClock, script: list[str]) -> None:
    inner = Flaky(*script, keeps_tokens=False)
    MemoryStore.put_if_absent(inner, "x", b"", token="theirs")

    with pytest.raises(ObjectExists):
        with_retries(inner, clock).put_if_absent("x", b"")


def test_an_uncertain_create_raises_object_exists_if_the_object_has_a_foreign_token(
    clock: PauseClock,
) -> None:
    inner = Flaky("before")
    inner.then = lambda: MemoryStore.put_if_absent(inner, "x", b"", token="theirs")

    with pytest.raises(ObjectExists):
        with_retries(inner, clock).put_if_absent("x", b"")


def test_without_tokens_an_uncertain_create_raises_object_exists_if_the_bytes_differ(
    clock: PauseClock,
) -> None:
    inner = Flaky("before", keeps_tokens=False)
    inner.then = lambda: MemoryStore.put_if_absent(inner, "x", b"theirs")

    with pytest.raises(ObjectExists):
        with_retries(inner, clock).put_if_absent("x", b"ours")


@pytest.mark.parametrize("content", [b"", b"same"])
@pytest.mark.parametrize("ours", [True, False])
def test_without_tokens_an_uncertain_create_raises_unavailable_if_the_bytes_are_equal(
    clock: PauseClock, content: bytes, ours: bool
) -> None:
    inner = Flaky("after" if ours else "before", keeps_tokens=False)
    if not ours:
        inner.then = lambda: MemoryStore.put_if_absent(inner, "x", content)

    with pytest.raises(Unavailable, match="whether it was written is unknown"):
        with_retries(inner, clock).put_if_absent("x", content)


@pytest.mark.parametrize("failure", ["before", "after"])
def test_an_uncertain_update_that_was_overwritten_raises_unavailable(clock: PauseClock, failure: str) -> None:
    inner = Flaky()
    first = inner.put("x", b"1")
    inner.script.append(failure)
    inner.then = lambda: MemoryStore.put(inner, "x", b"theirs")

    with pytest.raises(Unavailable, match="whether it was written is unknown"):
        with_retries(inner, clock).put_if_match("x", b"2", first)


def test_a_refused_update_that_was_overwritten_raises_object_changed(clock: PauseClock) -> None:
    inner = Flaky()
    first = inner.put("x", b"1")
    inner.put("x", b"theirs")
    inner.script.append("refused")

    with pytest.raises(ObjectChanged):
        with_retries(inner, clock).put_if_match("x", b"2", first)


def test_an_uncertain_create_whose_object_is_gone_raises_unavailable(clock: PauseClock) -> None:
    class Deletes(Flaky):
        def head(self, path: str) -> ObjectMeta:
            self.delete(path)
            return super().head(path)

    with pytest.raises(Unavailable, match="unknown"):
        with_retries(Deletes("after"), clock).put_if_absent("x", b"")


def test_a_create_refused_although_there_is_no_object_is_tried_again(clock: PauseClock) -> None:
    class Undecided(Flaky):
        answers = 3

        def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
            self.answers -= 1
            if self.answers:
                raise ObjectExists(path)
            return super().put_if_absent(path, data, token=token)

    inner = Undecided()
    with_retries(inner, clock).put_if_absent("x", b"1")
    assert inner.get("x").data == b"1"

    never = Undecided()
    never.answers = 10**6
    with pytest.raises(ObjectExists):
        with_retries(never, clock).put_if_absent("x", b"1")


def test_an_update_refused_although_nothing_changed_is_tried_again(clock: PauseClock) -> None:
    class Undecided(Flaky):
        answers = 3

        def put_if_match(
            self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
        ) -> ObjectVersion:
            self.answers -= 1
            if self.answers:
                raise ObjectChanged(path)
            return super().put_if_match(path, data, version, token=token)

    inner = Undecided()
    first = inner.put("x", b"1")
    with_retries(inner, clock).put_if_match("x", b"2", first)
    assert inner.get("x").data == b"2"

    never = Undecided()
    never.answers = 10**6
    with pytest.raises(ObjectChanged):
        with_retries(never, clock).put_if_match("x", b"2", never.put("x", b"1"))


def test_an_uncertain_create_after_the_deadline_raises_unavailable_as_unknown(clock: PauseClock) -> None:
    with pytest.raises(Unavailable, match=r"^503: put_if_absent of x .*; whether it was written is unknown"):
        with_retries(Flaky(*["before"] * 99), clock).put_if_absent("x", b"")
    with pytest.raises(Unavailable) as certain:
        with_retries(Flaky(*["refused"] * 99), clock).put_if_absent("x", b"")
    assert "unknown" not in str(certain.value)


def test_the_check_after_an_uncertain_create_is_retried(clock: PauseClock) -> None:
    inner = Flaky("after")
    inner.reads.extend(["before", "before"])

    with_retries(inner, clock).put_if_absent("x", b"")

    assert inner.calls == ["put_if_absent", "put_if_absent", "head", "head", "head"]


def test_all_attempts_of_a_create_use_one_token(clock: PauseClock) -> None:
    seen: list[str | None] = []

    class Recorder(Flaky):
        def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
            seen.append(token)
            return super().put_if_absent(path, data, token=token)

    inner = Recorder("before", "before")
    store = with_retries(inner, clock)
    store.put_if_absent("x", b"")
    store.put_if_absent("y", b"")

    assert seen[0]
    assert seen[0] == seen[1] == seen[2]
    assert seen[3] != seen[0]


def test_invalid_policies_are_refused_and_valid_ones_are_pickled() -> None:
    with pytest.raises(InvalidRequest):
        RetryPolicy(initial_backoff_s=2, max_backoff_s=1)
    with pytest.raises(InvalidRequest):
        RetryPolicy(jitter=2)
    with pytest.raises(InvalidRequest):
        RetryPolicy(attempts=0)
    store = RetryingStore(MemoryStore.named("policy"), policy=RetryPolicy(deadline_s=7))
    assert pickle.loads(pickle.dumps(store)).policy.deadline_s == 7
