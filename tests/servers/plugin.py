"""The servers as pytest fixtures. Each starts at its first use; all stop with the test run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servers.azure import AzureServer, start_azurite
from servers.commit_logs import new_log
from servers.gcs import GcsServer
from servers.postgres import start_postgres
from servers.s3 import S3Server, start_ministack, start_seaweedfs
from servers.shared import ServerMissingError, note_used, shared, stop_all, summarize

__all__ = ["azurite", "gcs", "ministack", "new_log", "postgres_url", "seaweedfs"]

Start = Callable[[], tuple[int, dict[str, object]]]

TITLES = {
    "seaweedfs": "SeaweedFS (S3)",
    "ministack": "MiniStack (S3, DynamoDB)",
    "azurite": "Azurite (Azure Blob)",
    "postgres": "PostgreSQL",
    "gcs": "GCS stand-in",
}
"""The name of every server in the last line of a run."""

_SUMMARY = pytest.StashKey[str | None]()


@pytest.fixture(scope="session")
def seaweedfs(request: pytest.FixtureRequest) -> S3Server:
    return S3Server(_port(request.config, "seaweedfs", start_seaweedfs))


@pytest.fixture(scope="session")
def ministack(request: pytest.FixtureRequest) -> S3Server:
    return S3Server(_port(request.config, "ministack", start_ministack))


@pytest.fixture(scope="session")
def azurite(request: pytest.FixtureRequest) -> AzureServer:
    return AzureServer(_port(request.config, "azurite", start_azurite))


@pytest.fixture(scope="session")
def postgres_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database for SQLAlchemy."""
    return str(_facts(request.config, "postgres", start_postgres)["url"])


@pytest.fixture(scope="session")
def gcs(request: pytest.FixtureRequest) -> Iterator[GcsServer]:
    note_used(_registry(request.config), "gcs")
    with GcsServer() as server:
        yield server


def pytest_sessionfinish(session: pytest.Session) -> None:
    # The pytest processes share the servers, so only the controlling process stops them. If it dies first, the
    # guards stop them.
    if not hasattr(session.config, "workerinput"):
        registry = _registry(session.config)
        session.config.stash[_SUMMARY] = summarize(registry, TITLES)
        stop_all(registry)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run names the servers its tests used, so that a skipped one is not overlooked."""
    summary = config.stash.get(_SUMMARY, None)
    if summary is not None:
        sys.stdout.write(f"{summary}\n")
        sys.stdout.flush()


def _port(config: pytest.Config, name: str, start: Start) -> int:
    return int(str(_facts(config, name, start)["port"]))


def _facts(config: pytest.Config, name: str, start: Start) -> dict[str, object]:
    try:
        return shared(_registry(config), name, start)
    except ServerMissingError as reason:
        pytest.skip(str(reason))


def _registry(config: pytest.Config) -> Path:
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    base = factory.getbasetemp()
    return (base.parent if hasattr(config, "workerinput") else base) / "servers"
