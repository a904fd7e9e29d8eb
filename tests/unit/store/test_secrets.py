"""Secrets stay out of reprs, errors and pickles; a pickle has them only where `pickle_secrets` says so."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.store.commit_log.postgres import PostgresCommitLog, passwords_of, without_password
from flagstone.store.remote_options import SECRET_OPTIONS
from flagstone.store.resolve import open_commit_log, resolve

WORD = "hunter2"
POSTGRES = f"postgresql://shop:{WORD}@127.0.0.1:1/db"


def shown(error: BaseException) -> str:
    """All that a traceback would print, with causes and contexts."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        (POSTGRES, "postgresql://shop@127.0.0.1:1/db"),
        ("postgresql+psycopg://u:p%40ss@h/d?table=t", "postgresql+psycopg://u@h/d?table=t"),
        ("postgresql://u:p@ss@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d?password=x&table=t", "postgresql://h/d?table=t"),
        ("postgresql://h/d?sslpassword=x", "postgresql://h/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql://h:5432/d?options=-c%20a", "postgresql://h:5432/d?options=-c%20a"),
        ("sqlite:///x/y", "sqlite:///x/y"),
    ],
)
def test_a_url_loses_its_password_and_nothing_else(url: str, plain: str) -> None:
    assert without_password(url) == plain
    assert passwords_of(plain) == ()
    assert bool(passwords_of(url)) == (url != plain)


@pytest.mark.slow
def test_a_pickled_commit_log_has_no_password() -> None:
    log = open_commit_log(POSTGRES, namespace="s3://bucket")
    pickled = pickle.dumps(log)
    assert WORD.encode() not in pickled
    arrived = pickle.loads(pickled)
    assert arrived._url == "postgresql+psycopg://shop@127.0.0.1:1/db"
    assert WORD.encode() not in pickle.dumps(arrived)
    with pytest.raises(flagstone.Unavailable, match="PGPASSWORD"):
        arrived.find("x")


def test_a_pickled_commit_log_keeps_its_password_with_pickle_secrets() -> None:
    log = open_commit_log(POSTGRES, namespace="s3://bucket", pickle_secrets=True)
    arrived = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(log))))
    assert arrived._url == log._url  # type: ignore[attr-defined]
    assert WORD in arrived._url


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("base", ["folder", "bucket"])
def test_pickle_secrets_of_a_store_applies_to_its_commit_log(tmp_path: Path, base: str, flag: bool) -> None:
    url = "s3://bucket" if base == "bucket" else tmp_path
    options: dict[str, Any] = {"commit_log": POSTGRES, "pickle_secrets": flag}
    if base == "bucket":
        options["secret_access_key"] = WORD
    for holder in (
        resolve(url, **options),
        Admin("db", store=url, store_options=options),
        flagstone.WalReader("db", store=url, store_options=options),
    ):
        assert WORD not in repr(holder)
        assert (WORD.encode() in pickle.dumps(holder)) is flag
        pickle.loads(pickle.dumps(holder))


def test_a_pickled_store_has_none_of_its_secret_options() -> None:
    options: dict[str, Any] = {"access_key_id": f"{WORD}a", "secret_access_key": f"{WORD}b"}
    options |= {"session_token": f"{WORD}c", "proxy_url": f"http://u:{WORD}d@127.0.0.1:1"}
    assert options.keys() <= SECRET_OPTIONS
    store = resolve("s3://bucket", **options)
    assert WORD.encode() not in pickle.dumps(store)
    assert WORD not in repr(store)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://shop:{WORD}/x@127.0.0.1/db",
        f"postgresql://shop:x?{WORD}@127.0.0.1/db",
        f"postgresql://shop:x#{WORD}@127.0.0.1/db",
        f"postgresql://shop:[{WORD}@127.0.0.1/db",
        f"postgresql://shop:{WORD}@127.0.0.1:port/db",
        f"dynamodb://key:{WORD}@commits",
        f"dynamodb://commits?endpoint_url=http://key:{WORD}@127.0.0.1:1",
        f"//shop:{WORD}@host/db",
        f"{WORD}",
        f"mysql://shop:{WORD}@host/db",
    ],
)
def test_a_commit_log_that_is_refused_shows_no_secret(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_commit_log(url, namespace="s3://bucket")
    assert WORD not in shown(refused.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda: PostgresCommitLog(f"postgresql+psycopg://shop:{WORD}@127.0.0.1:1/db").find("x"),
        lambda: PostgresCommitLog(f"postgresql+psycopg://shop:{WORD}@127.0.0.1:no/db").find("x"),
        lambda: PostgresCommitLog(f"postgresql+psycopg://127.0.0.1:1/db?password={WORD}").find("x"),
        lambda: PostgresCommitLog(f"{WORD}").find("x"),
    ],
)
def test_a_commit_log_that_cannot_be_reached_shows_no_secret(use: Callable[[], object]) -> None:
    with pytest.raises(flagstone.FlagstoneError) as failed:
        use()
    assert WORD not in shown(failed.value)


@pytest.mark.parametrize(
    "address",
    [f"s3://key:{WORD}@bucket/db", f"az://key:{WORD}@box/db", f"http://key:{WORD}@host/db"],
)
def test_an_address_with_credentials_is_refused_without_repeating_them(address: str) -> None:
    for attempt in (
        lambda: flagstone.open(address),
        lambda: flagstone.open("db", store=address),
        lambda: flagstone.open(address, store="/tmp/nowhere"),
        lambda: Admin(address),
    ):
        with pytest.raises(InvalidRequest) as refused:
            attempt()
        assert WORD not in shown(refused.value)
