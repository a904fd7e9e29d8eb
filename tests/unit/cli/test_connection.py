"""Options and environment variables that name the database, and secrets in options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flagstone.cli.connection import connect
from flagstone.cli.context import Invocation
from flagstone.errors import InvalidRequest
from unit.cli.running import Flagstone


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"CLOUD_PROVIDER": "aws", "AWS_BUCKET": "bucket"}, "s3://bucket"),
        ({"CLOUD_PROVIDER": "AWS", "AWS_BUCKET_NAME": "bucket"}, "s3://bucket"),
        ({"CLOUD_PROVIDER": "azure", "AZURE_CONTAINER_NAME": "box"}, "az://box"),
        ({"CLOUD_PROVIDER": "gcp", "GOOGLE_BUCKET": "bucket"}, "gs://bucket"),
        ({"CLOUD_PROVIDER": "local", "LOCAL_PATH": "/data"}, "file:///data"),
    ],
)
def test_the_environment_of_slatedbs_tools_names_the_store(
    quiet_environment: Callable[..., None], variables: dict[str, str], url: str
) -> None:
    quiet_environment(**variables)
    found = connect(Invocation(path="team/shop"))
    assert (found.store.url, found.root) == (url, "team/shop")


def test_a_whole_address_wins_over_the_environment(quiet_environment: Callable[..., None]) -> None:
    quiet_environment(CLOUD_PROVIDER="aws", AWS_BUCKET="bucket")
    assert connect(Invocation(path="s3://other/shop")).store.url == "s3://other"
    assert connect(Invocation(path="shop", store="gs://other")).store.url == "gs://other"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CLOUD_PROVIDER": "floppy"}, "CLOUD_PROVIDER is 'floppy'"),
        ({"CLOUD_PROVIDER": "aws"}, "AWS_BUCKET is not set"),
    ],
)
def test_an_incomplete_environment_raises_invalid_request(
    quiet_environment: Callable[..., None], variables: dict[str, str], words: str
) -> None:
    quiet_environment(**variables)
    with pytest.raises(InvalidRequest, match=words):
        connect(Invocation(path="shop"))


@pytest.mark.slow
def test_a_local_database_may_be_named_by_folder_store_or_environment(
    quiet_environment: Callable[..., None], shop: Flagstone, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    assert shop.json("scan", "--count")["entries"] == 10
    assert shop.json("--store", str(folder), "scan", "--count", path="shop")["entries"] == 10
    assert shop.json("--store", f"file://{folder}", "scan", "--count", path="shop")["entries"] == 10
    quiet_environment(CLOUD_PROVIDER="local", LOCAL_PATH=str(folder))
    assert shop.json("scan", "--count", path="shop")["entries"] == 10


def test_the_wal_may_have_its_own_store(cli: Flagstone, tmp_path: Path) -> None:
    wal_store = ("--wal-store", str(tmp_path / "wal"))
    cli.ok(*wal_store, "put", "--create", "k", "v")
    assert list((tmp_path / "wal").rglob("*.sst"))
    assert not list(cli.path.rglob("wal"))
    stats = cli.json(*wal_store, "stats")
    assert stats["objects"]["wal"]["count"] == 2
    assert stats["log"]["fences"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("secret_access_key=hunter2", "would show a secret"),
        ("commit_log=postgresql://u:hunter2@h/d", "would show a secret"),
        ("endpoint", "is not NAME=VALUE"),
        ("endpiont=http://x", "did you mean 'endpoint'"),
        ("read_timeout=soon", "'soon' is not a duration"),
    ],
)
def test_the_error_for_a_bad_store_option_shows_no_secret(shop: Flagstone, option: str, words: str) -> None:
    error = shop.refused("-o", option, "stats", path="s3://bucket/shop")
    assert words in error
    assert "hunter2" not in error


@pytest.mark.slow
@pytest.mark.parametrize("path", ["s3://bucket", "gs://bucket/", "/"])
def test_a_path_without_a_database_name_is_a_bad_request(shop: Flagstone, path: str) -> None:
    assert "database needs a" in shop.refused("stats", path=path)


@pytest.mark.parametrize("timeout", ["0s", "soon"])
def test_a_timeout_must_be_a_duration_above_zero(shop: Flagstone, timeout: str) -> None:
    shop.refused("--timeout", timeout, "stats")
