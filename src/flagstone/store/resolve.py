"""From a URL to a store, and from a database's address to its store and its path there.

/data/shop, data/shop, file:///data/shop     a folder
memory://NAME/shop                           the process-wide memory store of that name
s3://bucket/shop                             Amazon S3 and what speaks its protocol (option `endpoint`)
gs://bucket/shop                             Google Cloud Storage
az://container/shop, abfss://container@account.dfs.core.windows.net/shop     Azure Blob Storage
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from flagstone.errors import InvalidRequest
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
"""A store, or where to find one."""

_LOCAL_OPTIONS: Final = frozenset(["fsync"])


def resolve(
    url: str | os.PathLike[str],
    *,
    retry: RetryPolicy | None = None,
    commit_log: str | None = None,
    **options: OptionValue,
) -> ObjectStore:
    """The store whose root is at `url`; nothing is contacted yet.

    `commit_log` is for services without conditional writes: a transactional table that decides them, as
    `sqlite:///path`, `postgresql://user@host/database` or `dynamodb://TABLE`. All writers must name the same.

    A remote store comes with retries as `retry` says. Its options are those of the service (`endpoint`,
    `region`, `access_key_id`, `secret_access_key`, `allow_http`, `timeout`, …) and `pickle_secrets`; what is
    not given comes from the environment. A folder knows `fsync`.

    Raises:
        InvalidRequest: the URL or an option is not understood; the message names the nearest right option.

    """
    if commit_log is None:
        return _plain(os.fspath(url), retry, options)
    pickle_secrets = _flag("pickle_secrets", options.get("pickle_secrets", False))
    if _scheme(os.fspath(url)) not in SERVICE_OF_SCHEME:
        options.pop("pickle_secrets", None)  # a folder has no secrets of its own
    store = _plain(os.fspath(url), retry, options)
    # Here, because few need it.
    from flagstone.store.commit_log.locate import open_commit_log  # noqa: PLC0415
    from flagstone.store.two_phase import TwoPhaseStore  # noqa: PLC0415

    log = open_commit_log(commit_log, namespace=store.url, pickle_secrets=pickle_secrets)
    return RetryingStore(TwoPhaseStore(store, log), policy=retry)


def resolve_wal_store(
    wal_store: StoreLike | None, main: ObjectStore, store_options: Mapping[str, OptionValue] | None = None
) -> ObjectStore:
    """The store of a database's log: `main`, unless it has one of its own, which takes the same options."""
    if wal_store is None:
        return main
    if isinstance(wal_store, str | os.PathLike):
        return resolve(wal_store, **dict(store_options or {}))  # type: ignore[arg-type]
    return wal_store


def _plain(text: str, retry: RetryPolicy | None, options: dict[str, OptionValue]) -> ObjectStore:
    scheme = _scheme(text)
    if scheme == "memory":
        name, path = _memory_place(text)
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
    """The store a database lives in, and its path inside that store.

    With `store`, `path` is inside it. Without, a folder's store is its parent, so that clones beside it share
    one store; a bucket URL's store is the whole bucket.

    Raises:
        InvalidRequest: the address is not understood, or options came with a store that is already open.

    """
    address, options = os.fspath(path), dict(store_options or {})
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
        name, inside = _memory_place(address)
        return resolve(f"memory://{name}", **options), inside  # type: ignore[arg-type]
    if scheme in SERVICE_OF_SCHEME:
        place = parse_remote_url(address)
        bucket = RemoteUrl(place.service, place.bucket, "", place.account)
        return resolve(str(bucket), **options), place.prefix  # type: ignore[arg-type]
    folder = _folder(address)
    if not folder.name:
        raise InvalidRequest("a database needs a folder of its own; the root of the file system is none")
    return resolve(folder.parent, **options), folder.name  # type: ignore[arg-type]


def resolve_neighbour(address: str | os.PathLike[str], store: ObjectStore) -> str:
    """The path inside `store` that an address means: databases that share tables share a store.

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
        place = _folder(text).as_uri()
    else:
        place = str(parse_remote_url(text)) if _scheme(text) in SERVICE_OF_SCHEME else text
    inside = place.removeprefix(home + "/").strip("/")
    if inside == place.strip("/"):
        raise InvalidRequest(
            f"{text} is not in {store.url}; databases that share tables must be in the same store, and a "
            "relative path is one inside it"
        )
    return check_path(unquote(inside) if home.startswith("file:") else inside)


def _remote(place: RemoteUrl, options: dict[str, OptionValue], retry: RetryPolicy | None) -> ObjectStore:
    # Here, because the native client would double the time of `import flagstone`.
    from flagstone.store.remote import RemoteStore  # noqa: PLC0415

    pickle_secrets = _flag("pickle_secrets", options.pop("pickle_secrets", False))
    inner = RemoteStore(str(place), options=options, pickle_secrets=pickle_secrets)
    return RetryingStore(inner, policy=retry)


def _local(folder: Path, options: Mapping[str, OptionValue]) -> LocalStore:
    _check_known(options, _LOCAL_OPTIONS, "folders")
    return LocalStore(folder, fsync=_flag("fsync", options.get("fsync", True)))


def _flag(name: str, value: OptionValue) -> bool:
    """Yes or no, also as the text that a command line or a configuration file gives."""
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


def _scheme(address: str) -> str | None:
    scheme, separator, _ = address.partition("://")
    if not separator:
        return None
    if scheme not in ("file", "memory") and scheme not in SERVICE_OF_SCHEME:
        raise InvalidRequest(
            f"no store speaks {scheme}://; use a path, file://, memory://, s3://, gs:// or az://"
        )
    return scheme


def _memory_place(url: str) -> tuple[str, str]:
    name, _, path = url.removeprefix("memory://").partition("/")
    if not name:
        raise InvalidRequest(f"{url} needs a name, so that it can be opened twice: memory://NAME/path")
    inside = path.strip("/")
    return name, check_path(inside) if inside else ""


def _folder(address: str) -> Path:
    if not address:
        raise InvalidRequest("an empty path names no folder; use '.' for the current one")
    if not address.startswith("file://"):
        # normpath, because ".." in the middle would end up as a name inside the store.
        return Path(os.path.normpath(Path(address).expanduser().absolute()))
    host, _, path = address.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise InvalidRequest(f"{address} is on the host {host!r}; a folder on this machine is file:///path")
    return Path(os.path.normpath(f"/{unquote(path)}"))
