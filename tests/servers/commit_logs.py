"""New commit logs of every kind, for tests that run on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.commit_log import CommitLog
from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog
from flagstone.store.commit_log.postgres import PostgresCommitLog
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from servers.s3 import S3Server

NewLog = Callable[[], CommitLog]


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.slow),
        pytest.param("dynamodb", marks=pytest.mark.slow),
    ]
)
def new_log(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NewLog]:
    """Creates empty commit logs of one kind, and closes them at the end."""
    match request.param:
        case "sqlite":
            make = _sqlite(tmp_path)
        case "postgres":
            make = _postgres(request.getfixturevalue("postgres_url"))
        case _:
            server: S3Server = request.getfixturevalue("ministack")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key_id)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_access_key)
            make = _dynamodb(server)
    made: list[CommitLog] = []

    def make_and_remember() -> CommitLog:
        made.append(make())
        return made[-1]

    yield make_and_remember
    for log in made:
        log.close()


def _sqlite(folder: Path) -> NewLog:
    # These tests do not simulate power loss.
    return lambda: SqliteCommitLog(folder / f"{SYSTEM_IDS.token()}.db", synchronous="OFF")


def _postgres(url: str) -> NewLog:
    return lambda: PostgresCommitLog(url, namespace=SYSTEM_IDS.token())


def _dynamodb(server: S3Server) -> NewLog:
    return lambda: DynamoDbCommitLog(
        "commits",
        namespace=SYSTEM_IDS.token(),
        region=server.region,
        endpoint_url=server.endpoint,
        create_table=True,
    )
