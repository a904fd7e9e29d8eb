"""From a URL to a commit log.

sqlite:///var/lib/shop/commits.db                         one machine
postgresql://user@host/database?table=commits             many machines
dynamodb://TABLE?region=eu-west-1&create_table=true       many machines, nothing to run
"""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from flagstone.errors import InvalidRequest
from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog
from flagstone.store.commit_log.port import CommitLog
from flagstone.store.commit_log.postgres import PostgresCommitLog
from flagstone.store.commit_log.sqlite import SqliteCommitLog


def open_commit_log(url: str, *, namespace: str, pickle_secrets: bool = False) -> CommitLog:
    """The commit log at `url`; nothing is contacted yet. `namespace` is the store it decides for.

    A password in the URL is part of a pickle only with `pickle_secrets`.

    Raises `InvalidRequest`, which never repeats the URL's password, when the URL is not understood.
    """
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    match parts.scheme:
        case "sqlite" if not parts.netloc and parts.path:
            _only(options, set(), parts.scheme)
            return SqliteCommitLog(unquote(parts.path))
        case "postgresql":
            _only(options, {"table"}, parts.scheme)
            address = urlunsplit(("postgresql+psycopg", parts.netloc, parts.path, "", ""))
            return PostgresCommitLog(
                address,
                table=options.get("table", "flagstone_commits"),
                namespace=namespace,
                pickle_secrets=pickle_secrets,
            )
        case "dynamodb" if parts.netloc and not parts.path:
            _only(options, {"region", "endpoint_url", "create_table"}, parts.scheme)
            if "@" in parts.netloc or "@" in options.get("endpoint_url", ""):
                raise InvalidRequest(
                    "dynamodb: the URL must not carry credentials; they come from the usual AWS configuration"
                )
            return DynamoDbCommitLog(
                parts.netloc,
                namespace=namespace,
                region=options.get("region"),
                endpoint_url=options.get("endpoint_url"),
                create_table=options.get("create_table", "false") == "true",
            )
        case _:
            raise InvalidRequest(
                "a commit log is sqlite:///path, postgresql://user@host/database or dynamodb://TABLE; "
                + (f"this one begins with {parts.scheme!r}" if parts.scheme else "this one has no scheme")
            )


def _split(url: str) -> SplitResult:
    """The parts of the URL. A password with a / ? # that is not encoded ends the host early: refused, not repeated."""
    try:
        parts = urlsplit(url)
        whole = parts.port is None or "@" not in f"{parts.path}{parts.query}"
    except ValueError:
        whole = False
    if not whole or parts.fragment or "@" in parts.query:
        raise InvalidRequest(
            "the URL of the commit log is not understood; percent-encode / ? # [ ] @ : in its password"
        )
    return parts


def _only(options: dict[str, str], known: set[str], scheme: str) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        choices = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(f"{scheme}: unknown option {unknown[0]!r} of a commit log; it takes {choices}")
