"""Commit logs by URL, and stores that use one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import VirtualClock
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectExists
from flagstone.store.resolve import open_commit_log, resolve, resolve_database
from flagstone.store.retrying import RetryingStore
from flagstone.store.two_phase import TwoPhaseStore


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///tmp/commits.db",
        "postgresql://user:secret@127.0.0.1/db?table=t",
        "dynamodb://commits?region=eu-west-1&create_table=true",
    ],
)
def test_known_urls_open_without_contact_and_hide_their_secrets(url: str) -> None:
    assert "secret" not in repr(open_commit_log(url, namespace="s3://bucket"))


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:secret@host/db",
        "sqlite://host/x",
        "dynamodb://",
        "postgresql://user:secret@h/d?tabel=x",
        "x",
    ],
)
def test_other_urls_are_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_commit_log(url, namespace="s3://bucket")
    assert "secret" not in str(caught.value)


def test_a_store_with_a_commit_log_decides_by_it_and_pickles(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    url = f"sqlite://{tmp_path / 'commits.db'}"
    store, root = resolve_database(folder / "shop", store_options={"commit_log": url})
    store.put_if_absent("shop/a", b"one")
    with pytest.raises(ObjectExists):
        pickle.loads(pickle.dumps(store)).put_if_absent("shop/a", b"two")
    assert root == "shop"
    assert resolve(folder).get("shop/a").data == b"one", "the layout is that of a plain store"


def test_creating_a_deleted_path_raises_object_exists_without_retries(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = RetryingStore(TwoPhaseStore(MemoryStore(), SqliteCommitLog(tmp_path / "commits.db")), clock=clock)
    store.put_if_absent("a", b"one")
    store.delete("a")
    started = clock.monotonic()
    with pytest.raises(ObjectExists):
        store.put_if_absent("a", b"two")
    assert clock.monotonic() - started < 10
