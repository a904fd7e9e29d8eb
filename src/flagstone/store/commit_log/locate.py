"""From a URL to a commit log.

sqlite:///var/lib/shop/commits.db                         one machine
postgresql://user@host/database?table=commits             many machines
dynamodb://TABLE?region=eu-west-1&create_table=true       many machines, nothing to run
"""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from flagstone.errors import InvalidRequest
from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog
from flagstone.store.commit_log.port import CommitLog
from flagstone.store.commit_log.postgres import PostgresCommitLog
from flagstone.store.commit_log.sqlite import SqliteCommitLog


def open_commit_log(url: str, *, namespace: str) -> CommitLog:
    """The commit log at `url`; nothing is contacted yet. `namespace` is the store it decides for.

    Raises `InvalidRequest`, which never repeats the URL's password, when the URL is not understood.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    match parts.scheme:
        case "sqlite" if not parts.netloc and parts.path:
            _only(options, set(), parts.scheme)
            return SqliteCommitLog(unquote(parts.path))
        case "postgresql":
            _only(options, {"table"}, parts.scheme)
            address = urlunsplit(("postgresql+psycopg", parts.netloc, parts.path, "", ""))
            return PostgresCommitLog(
                address, table=options.get("table", "flagstone_commits"), namespace=namespace
            )
        case "dynamodb" if parts.netloc and not parts.path:
            _only(options, {"region", "endpoint_url", "create_table"}, parts.scheme)
            return DynamoDbCommitLog(
                parts.netloc,
                namespace=namespace,
                region=options.get("region"),
                endpoint_url=options.get("endpoint_url"),
                create_table=options.get("create_table", "false") == "true",
            )
        case _:
            raise InvalidRequest(
                f"a commit log is sqlite:///path, postgresql://user@host/database or dynamodb://TABLE; "
                f"this one begins with {parts.scheme or url[:20]!r}"
            )


def _only(options: dict[str, str], known: set[str], scheme: str) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        choices = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(f"{scheme}: unknown option {unknown[0]!r} of a commit log; it takes {choices}")
