from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flagstone.errors import InvalidRequest
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.resolve import resolve, resolve_database
from flagstone.store.retrying import RetryingStore, RetryPolicy


def test_a_folder_is_a_path_or_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spaced = tmp_path / "a b"
    for address in (str(spaced), spaced, spaced.as_uri(), f"file://{tmp_path}/a%20b", "a b", "./x/../a b"):
        store = resolve(address)
        assert isinstance(store, LocalStore)
        assert store.url == spaced.as_uri()
    for off in (False, "false", 0):
        assert repr(resolve(tmp_path, fsync=off)).endswith("fsync=False)")
    with pytest.raises(InvalidRequest, match="true or false"):
        resolve(tmp_path, fsync="maybe")


def test_memory_stores_are_shared_by_name() -> None:
    assert resolve("memory://resolve-a") is resolve("memory://resolve-a/")
    assert resolve("memory://resolve-a") is not resolve("memory://resolve-b")


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("gs://bucket/a%20b?c", "gs://bucket/a%20b?c"),
        ("az://container/a", "az://container/a"),
        (
            "abfss://container@account.dfs.core.windows.net/a",
            "abfss://container@account.dfs.core.windows.net/a",
        ),
    ],
)
def test_remote_stores_are_opened_with_retries(url: str, meant: str) -> None:
    store = resolve(url, retry=RetryPolicy(deadline_s=3), allow_http=True)

    assert isinstance(store, RetryingStore)
    assert store.url == meant
    assert store.policy.deadline_s == 3


@pytest.mark.parametrize(
    ("address", "store", "root"),
    [
        ("file:///data/shop", "file:///data", "shop"),
        ("/data/shops/shop/", "file:///data/shops", "shop"),
        ("memory://resolve-c/a/b", "memory://resolve-c", "a/b"),
        ("memory://resolve-c", "memory://resolve-c", ""),
        ("s3://bucket/a/b", "s3://bucket", "a/b"),
        ("s3://bucket", "s3://bucket", ""),
        ("abfs://c@acct.dfs.core.windows.net/a", "abfss://c@acct.dfs.core.windows.net", "a"),
    ],
)
def test_an_address_resolves_to_a_store_and_a_path(address: str, store: str, root: str) -> None:
    found, path = resolve_database(address)

    assert (found.url, path) == (store, root)


def test_a_path_with_a_given_store_is_inside_it(tmp_path: Path) -> None:
    memory = MemoryStore()
    assert resolve_database("a/b", memory) == (memory, "a/b")
    found, root = resolve_database("shop", tmp_path, {"fsync": False})
    assert (found.url, root) == (tmp_path.as_uri(), "shop")
    found, root = resolve_database("shop", "s3://bucket/deep", {"region": "eu-west-1"})
    assert (found.url, root) == ("s3://bucket/deep", "shop")
    with pytest.raises(InvalidRequest, match="already open"):
        resolve_database("a", memory, {"region": "x"})
    with pytest.raises(InvalidRequest, match="is a URL"):
        resolve_database("s3://b/x", memory)
    with pytest.raises(InvalidRequest):
        resolve_database("a/../b", memory)


@pytest.mark.parametrize(
    ("address", "options", "hint"),
    [
        ("ftp://host/x", {}, "there is no store for ftp://"),
        ("file://host/x", {}, "on the host 'host'"),
        ("memory://", {}, "needs a name"),
        ("", {}, "empty path"),
        ("/", {}, "folder of its own"),
        ("/data/x", {"fsink": True}, "did you mean 'fsync'"),
        ("memory://m/x", {"fsync": True}, "no option 'fsync'"),
        ("s3://b/x", {"regoin": "x"}, "did you mean 'region'"),
        ("s3://b/x", {"aws_access_key_id": "x"}, "did you mean 'access_key_id'"),
    ],
)
def test_unknown_urls_and_options_are_refused_with_a_hint(
    address: str, options: dict[str, str], hint: str
) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        resolve_database(address, store_options=options)


def test_the_url_of_a_memory_store_with_a_path_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="memory://m"):
        resolve("memory://m/x")


def test_the_native_client_loads_only_when_it_is_needed() -> None:
    script = (
        "import sys\n"
        "from flagstone.store.resolve import resolve, resolve_database\n"
        "resolve_database('/data/x'), resolve('memory://m')\n"
        "print('obstore' in sys.modules)\n"
        "resolve('s3://b')\n"
        "print('obstore' in sys.modules)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == ["False", "True"]
