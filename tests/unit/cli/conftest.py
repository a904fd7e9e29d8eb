"""Databases for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import flagstone
from unit.cli.running import Flagstone


@pytest.fixture
def cli(tmp_path: Path) -> Flagstone:
    """The command line on a database that does not exist yet."""
    return Flagstone(tmp_path / "store" / "shop")


@pytest.fixture
def shop(cli: Flagstone) -> Flagstone:
    """The command line on a database with ten users, one of them binary, in two SSTs."""
    with flagstone.open(cli.path) as database:
        for number in range(5):
            database.put(b"user/%d" % number, b"name %d" % number)
        database.flush()
        for number in range(5, 9):
            database.put(b"user/%d" % number, b"name %d" % number)
        database.put(b"\x00\xff", b"\x01\x02")
    return cli


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Clears the variables that name a store, and sets the given variables."""
    for name in ("CLOUD_PROVIDER", "LOCAL_PATH", "AWS_BUCKET", "FLAGSTONE_PATH", "FLAGSTONE_STORE"):
        monkeypatch.delenv(name, raising=False)

    def set_all(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all
