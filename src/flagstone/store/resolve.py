"""From a URL to a store, from a database address to a store and a path in it, from a URL to a commit log.

/data/shop, data/shop, file:///data/shop     a folder
memory://NAME/shop                           the process-wide memory store of that name
s3://bucket/shop                             Amazon S3 and what speaks its protocol (option `endpoint`)
gs://bucket/shop                             Google Cloud Storage
az://container/shop, abfss://container@account.dfs.core.windows.net/shop     Azure Blob Storage

sqlite:///var/lib/shop/commits.db                       a commit log for one machine
postgresql://user@host/database?table=commits           for many machines
dynamodb://TABLE?region=eu-west-1&create_table=true     for many machines, without a server to run
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from flagstone.errors import InvalidRequest
from flagstone.store.commit_log import CommitLog
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectStore, check_path
from flagstone.store.remote_options import (
    SERVICE_OF_SCHEME,
    OptionValue,
    RemoteUrl,
    nearest,
    parse_remote_url,
)
from flagstone.store.retrying import RetryingStore, RetryPolicy

StoreLike = ObjectStore | str | os.PathLike[str]
"""A store, or its URL or folder."""

_LOCAL_OPTIONS: Final = frozenset(["fsync"])
_SCHEMES: Final = ("file", "memory")


def resolve(
    url: str | os.PathLike[str],
    *,
    retry: RetryPolicy | None = None,
    commit_log: str | None = None,
    **options: OptionValue,
) -> ObjectStore:
    """The store whose root is at `url`. No connection is made yet.

    `commit_log` is for services without conditional writes: a transactional table that decides them, as
    `sqlite:///path`, `postgresql://user@host/database` or `dynamodb://TABLE`. All writers must use the same one.

    A remote store retries by the policy `retry`. Its options are those of the service (`endpoint`, `region`,
    `access_key_id`, `secret_access_key`, `allow_http`, `timeout`, …) and `pickle_secrets`; the others come from
    the environment. A folder has the option `fsync`.

    Raises:
        InvalidRequest: the URL is malformed or an option is unknown; the message names the nearest option.

    """
    text = _address(url)
    if commit_log is None:
        return _plain(text, retry, options)
    pickle_secrets = _flag("pickle_secrets", options.get("pickle_secrets", False))
    if _scheme(text) not in SERVICE_OF_SCHEME:
        options.pop("pickle_secrets", None)  # a folder has no secrets
    store = _plain(text, retry, options)
    # Imported here: most databases do not use it.
    from flagstone.store.two_phase import TwoPhaseStore  # noqa: PLC0415

    log = open_commit_log(commit_log, namespace=store.url, pickle_secrets=pickle_secrets)
    return RetryingStore(TwoPhaseStore(store, log), policy=retry)


def resolve_wal_store(
    wal_store: StoreLike | None, main: ObjectStore, store_options: Mapping[str, OptionValue] | None = None
) -> ObjectStore:
    """The store of a database's WAL: `main`, or `wal_store` with the same options."""
    if wal_store is None:
        return main
    if isinstance(wal_store, str | os.PathLike):
        return resolve(wal_store, **dict(store_options or {}))  # type: ignore[arg-type]
    return wal_store


def _plain(text: str, retry: RetryPolicy | None, options: dict[str, OptionValue]) -> ObjectStore:
    scheme = _scheme(text)
    if scheme == "memory":
        name, path = _split_memory_url(text)
        _check_known(options, frozenset(), "memory stores")
        if path:
            raise InvalidRequest(f"{text} names a path inside a memory store; the store is memory://{name}")
        return MemoryStore.named(name)
    if scheme in SERVICE_OF_SCHEME:
        return _remote(parse_remote_url(text), options, retry)
    return _local(_folder(text), options)


def resolve_database(
    path: str | os.PathLike[str],
    store: StoreLike | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
) -> tuple[ObjectStore, str]:
    """The store of a database, and its path inside that store.

    With `store`, `path` is inside it. Without it the store of a folder is its parent, so that clones beside it
    share one store, and the store of a bucket URL is the whole bucket.

    Raises:
        InvalidRequest: the address is malformed, or options were given for a store that is already open.

    """
    address, options = _address(path), dict(store_options or {})
    if store is not None:
        if "://" in address:
            raise InvalidRequest("with store=, the path is inside the store; this one is a URL")
        inside = address.strip("/")
        if isinstance(store, str | os.PathLike):
            return resolve(store, **options), check_path(inside) if inside else ""  # type: ignore[arg-type]
        if options:
            raise InvalidRequest("store_options belong to a store URL; this store is already open")
        return store, check_path(inside) if inside else ""
    scheme = _scheme(address)
    if scheme == "memory":
        name, inside = _split_memory_url(address)
        return resolve(f"memory://{name}", **options), inside  # type: ignore[arg-type]
    if scheme in SERVICE_OF_SCHEME:
        remote = parse_remote_url(address)
        bucket = RemoteUrl(remote.service, remote.bucket, "", remote.account)
        return resolve(str(bucket), **options), remote.prefix  # type: ignore[arg-type]
    folder = _folder(address)
    if not folder.name:
        raise InvalidRequest("a database needs a folder of its own; it cannot be the root of the file system")
    return resolve(folder.parent, **options), folder.name  # type: ignore[arg-type]


def resolve_neighbour(address: str | os.PathLike[str], store: ObjectStore) -> str:
    """The path inside `store` of a database address: databases that share SSTs share a store.

    A name, with or without slashes, is such a path already. A URL or a folder (one that begins with `/`, `./`, `../` or
    `~`) must lead into the store.

    Raises:
        InvalidRequest: the address is in another store, or names all of this one.

    """
    text = os.fspath(address)
    if "://" not in text and not text.startswith(("/", "~", "./", "../")):
        return check_path(text.strip("/"))
    home = store.url.rstrip("/")
    if _scheme(text) in (None, "file"):
        url = _folder(text).as_uri()
    else:
        url = str(parse_remote_url(text)) if _scheme(text) in SERVICE_OF_SCHEME else text
    inside = url.removeprefix(home + "/").strip("/")
    if inside == url.strip("/"):
        raise InvalidRequest(
            f"{text} is not in {store.url}; databases that share SSTs must be in the same store, and a relative "
            "path is one inside it"
        )
    return check_path(unquote(inside) if home.startswith("file:") else inside)


def _remote(address: RemoteUrl, options: dict[str, OptionValue], retry: RetryPolicy | None) -> ObjectStore:
    # Imported here: the native client would double the time of `import flagstone`.
    from flagstone.store.remote import RemoteStore  # noqa: PLC0415

    pickle_secrets = _flag("pickle_secrets", options.pop("pickle_secrets", False))
    inner = RemoteStore(str(address), options=options, pickle_secrets=pickle_secrets)
    return RetryingStore(inner, policy=retry)


def _local(folder: Path, options: Mapping[str, OptionValue]) -> LocalStore:
    _check_known(options, _LOCAL_OPTIONS, "folders")
    return LocalStore(folder, fsync=_flag("fsync", options.get("fsync", True)))


def _flag(name: str, value: OptionValue) -> bool:
    """A boolean, or its text as a command line or a configuration file gives it."""
    match str(value).lower():
        case "true" | "1":
            return True
        case "false" | "0":
            return False
        case _:
            raise InvalidRequest(f"option {name!r} is true or false, not {value!r}")


def _check_known(options: Mapping[str, OptionValue], known: frozenset[str], what: str) -> None:
    for name in options:
        if name not in known:
            suggestion = nearest(name, known) if known else ""
            raise InvalidRequest(f"{what} have no option {name!r}{suggestion}")


def _address(given: str | os.PathLike[str]) -> str:
    """The text of an address. Raises `InvalidRequest` for anything that is neither text nor a path."""
    if not isinstance(given, str | os.PathLike) or not isinstance(text := os.fspath(given), str):
        raise InvalidRequest(
            f"an address is a URL or a folder, as text or pathlib.Path, not {type(given).__name__}"
        )
    return text


def _scheme(address: str) -> str | None:
    scheme, separator, _ = address.partition("://")
    if not separator:
        _refuse_near_urls(address)
        return None
    if scheme not in _SCHEMES and scheme not in SERVICE_OF_SCHEME:
        if scheme.lower() in _SCHEMES or scheme.lower() in SERVICE_OF_SCHEME:
            raise InvalidRequest(f"write the scheme of a URL in lower case: {scheme.lower()}://")
        raise InvalidRequest(
            f"there is no store for {scheme}://; use a path, file://, memory://, s3://, gs:// or az://"
        )
    return scheme


def _refuse_near_urls(address: str) -> None:
    """Raise `InvalidRequest` for a path that was surely meant as a URL: a folder of that name would be a surprise."""
    if address == ":memory:":
        raise InvalidRequest(
            "':memory:' is no address here; use memory://NAME/path, where NAME is the store of this process"
        )
    scheme, colon, rest = address.partition(":")
    if not colon:  # s3//bucket/shop
        scheme, colon, rest = address.partition("//")
    if colon and (scheme.lower() in _SCHEMES or scheme.lower() in SERVICE_OF_SCHEME):
        slashes = "///" if scheme.lower() == "file" and rest.startswith("/") else "//"
        place = "…" if "@" in rest else rest.lstrip("/")  # it may contain a password
        raise InvalidRequest(
            f"a URL has '://' after {scheme!r}; write {scheme.lower()}:{slashes}{place}, or put ./ in front for a "
            "folder of that name"
        )


def _split_memory_url(url: str) -> tuple[str, str]:
    name, _, path = url.removeprefix("memory://").partition("/")
    if not name:
        raise InvalidRequest(f"{url} needs a name, by which it can be opened again: memory://NAME/path")
    inside = path.strip("/")
    return name, check_path(inside) if inside else ""


def _folder(address: str) -> Path:
    if not address:
        raise InvalidRequest("an empty path names no folder; use '.' for the current one")
    if not address.startswith("file://"):
        # normpath, because ".." in the middle would become a name inside the store.
        return Path(os.path.normpath(Path(address).expanduser().absolute()))
    host, _, path = address.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise InvalidRequest(f"{address} is on the host {host!r}; a folder on this machine is file:///path")
    return Path(os.path.normpath(f"/{unquote(path)}"))


def open_commit_log(url: str, *, namespace: str, pickle_secrets: bool = False) -> CommitLog:
    """The commit log at `url`. No connection is made yet. `namespace` is the URL of the store it decides for.

    A password in the URL is part of a pickle only with `pickle_secrets`.

    Raises `InvalidRequest`, which never repeats the URL's password, when the URL is malformed.
    """
    parts = _split_log_url(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    match parts.scheme:
        case "sqlite" if not parts.netloc and parts.path:
            _check_only(options, set(), parts.scheme)
            from flagstone.store.commit_log.sqlite import SqliteCommitLog  # noqa: PLC0415

            return SqliteCommitLog(unquote(parts.path))
        case "postgresql":
            _check_only(options, {"table"}, parts.scheme)
            from flagstone.store.commit_log.postgres import PostgresCommitLog  # noqa: PLC0415

            address = urlunsplit(("postgresql+psycopg", parts.netloc, parts.path, "", ""))
            return PostgresCommitLog(
                address,
                table=options.get("table", "flagstone_commits"),
                namespace=namespace,
                pickle_secrets=pickle_secrets,
            )
        case "dynamodb" if parts.netloc and not parts.path:
            _check_only(options, {"region", "endpoint_url", "create_table"}, parts.scheme)
            if "@" in parts.netloc or "@" in options.get("endpoint_url", ""):
                raise InvalidRequest(
                    "dynamodb: the URL must not carry credentials; they come from the usual AWS configuration"
                )
            from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog  # noqa: PLC0415

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


def _split_log_url(url: str) -> SplitResult:
    """The parts of the URL. A password with a / ? # that is not encoded ends the host early and is refused."""
    try:
        parts = urlsplit(url)
        whole = parts.port is None or "@" not in f"{parts.path}{parts.query}"
    except ValueError:
        whole = False
    if not whole or parts.fragment or "@" in parts.query:
        raise InvalidRequest(
            "the URL of the commit log is malformed; percent-encode / ? # [ ] @ : in its password"
        )
    return parts


def _check_only(options: dict[str, str], known: set[str], scheme: str) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        choices = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(f"{scheme}: unknown option {unknown[0]!r} of a commit log; it takes {choices}")
