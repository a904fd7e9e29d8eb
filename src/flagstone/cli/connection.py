"""Opens the stores that the global options name, with timeouts, retries and request counters.

A command must not hang because an address is wrong, so `--timeout` bounds the first request. Commands that may take
long then continue with the engine's own retry policy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from uuid import UUID

import flagstone
from flagstone.cli.context import Invocation
from flagstone.clones.checkpoint import find_checkpoint
from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.store.commit_log.postgres import passwords_of
from flagstone.store.counting import CountingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.remote_options import SECRET_OPTIONS, SERVICE_OF_SCHEME, OptionValue
from flagstone.store.resolve import resolve, resolve_database
from flagstone.store.retrying import RetryingStore, RetryPolicy

if TYPE_CHECKING:
    from flagstone.db.reader.as_of import AsOf
    from flagstone.lsm.merge_operator import MergeOperator

_LONGEST_CONNECT_S: Final = 5.0

_FOLDERS: Final = frozenset(DbPaths("").folders)
_LAST_NAME: Final = "~"
"""Sorts after every object name in a database."""

_ALLOW_HTTP: Final = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")

_PROVIDERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "local": ("{}", ("LOCAL_PATH",)),
    "aws": ("s3://{}", ("AWS_BUCKET", "AWS_BUCKET_NAME")),
    "azure": ("az://{}", ("AZURE_CONTAINER_NAME",)),
    "gcp": ("gs://{}", ("GOOGLE_BUCKET", "GOOGLE_BUCKET_NAME")),
}
"""The variables by which SlateDB's tools find the store: CLOUD_PROVIDER, then one of that provider's variables."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The stores of one database and its path in them; `main_requests` and `wal_requests` count the requests."""

    root: str
    store: ObjectStore
    wal_store: ObjectStore | None
    main_requests: CountingStore
    wal_requests: CountingStore | None

    @property
    def counters(self) -> tuple[CountingStore, ...]:
        return (self.main_requests,) if self.wal_requests is None else (self.main_requests, self.wal_requests)

    @property
    def requests(self) -> int:
        """The number of requests so far."""
        return sum(sum(counter.totals()["requests"].values()) for counter in self.counters)

    @property
    def bytes_moved(self) -> int:
        """The number of bytes read and written so far."""
        totals = [counter.totals() for counter in self.counters]
        return sum(total["bytes_read"] + total["bytes_written"] for total in totals)

    def stored_bytes(self) -> int:
        """The size of all objects of the database together. Lists them."""
        folders = [(self.store, self.root)]
        if self.wal_store is not None:
            folders.append((self.wal_store, DbPaths(self.root).wal_folder))
        return sum(meta.size for store, folder in folders for meta in store.list(folder))

    def admin(self) -> flagstone.Admin:
        """The operator's handle."""
        return flagstone.Admin(self.root, store=self.store, wal_store=self.wal_store)

    def checkpoint(self, given: str, *, newest: bool = True) -> UUID:
        """The id of the checkpoint with this id or name; of several with the name the newest.

        Raises:
            InvalidRequest: no checkpoint has the name, or several have it and `newest` is False.

        """
        return find_checkpoint(
            given,
            lambda: self.admin().manifest().value,
            now_s=SYSTEM_CLOCK.now_ms() // 1000,
            newest=newest,
        )

    def reader(
        self,
        *,
        checkpoint: str | None = None,
        as_of: AsOf | None = None,
        merge_operator: MergeOperator | None = None,
    ) -> flagstone.DbReader:
        """A reader that writes nothing, not even a checkpoint. `checkpoint` is an id or a name."""
        return flagstone.open_reader(
            self.root,
            store=self.store,
            wal_store=self.wal_store,
            checkpoint=None if checkpoint is None else self.checkpoint(checkpoint),
            as_of=as_of,
            mode="latest",
            merge_operator=merge_operator,
        )

    def database(
        self,
        settings: flagstone.Settings,
        *,
        create: bool = False,
        merge_operator: MergeOperator | None = None,
    ) -> flagstone.Db:
        """The database open for writing, without compactor and garbage collector: the command closes it soon."""
        without_services = settings.replace(compactor_options=None, garbage_collector_options=None)
        return flagstone.open(
            self.root,
            store=self.store,
            wal_store=self.wal_store,
            settings=without_services,
            create=create,
            merge_operator=merge_operator,
        )


def connect(call: Invocation, *, long_work: bool = False) -> Connection:
    """The stores that the options name. With `long_work` it sends one bounded request to each; otherwise none.

    Raises:
        InvalidRequest: the options name no database, or are not understood.
        Unavailable: `long_work`, and a store did not answer within `--timeout`.

    """
    if not long_work:
        return _connect(call, long_work=False)
    first = _connect(call, long_work=False)
    folder = DbPaths(first.root).manifest_folder
    for store in (first.store, first.wal_store):
        if store is not None:
            next(iter(store.list(folder)), None)
    return _connect(call, long_work=True)


def connect_below(call: Invocation, prefix: str, *, long_work: bool = False) -> list[Connection]:
    """The stores of every database below `prefix`, an address like `--path` or a whole store.

    Raises:
        InvalidRequest: the options are not understood.
        Unavailable: the store did not answer.

    """
    below = _connect(replace(call, path=prefix, further_paths=()), long_work=long_work, whole_store=True)
    return [replace(below, root=root) for root in find_databases(below.store, below.root)]


def address(call: Invocation, path: str) -> tuple[str, str | None]:
    """A path and the store that contains it, from options and environment; None if the path is a whole address."""
    if call.store is not None or "://" in path:
        return path, call.store
    provider = os.environ.get("CLOUD_PROVIDER", "").lower()
    if not provider:
        return path, None
    if provider not in _PROVIDERS:
        raise InvalidRequest(
            f"CLOUD_PROVIDER is {provider!r}; set it to one of {', '.join(_PROVIDERS)}, or name the store with --store"
        )
    form, variables = _PROVIDERS[provider]
    bucket = next((found for name in variables if (found := os.environ.get(name))), None)
    if bucket is None:
        raise InvalidRequest(
            f"CLOUD_PROVIDER is {provider}, but {variables[0]} is not set; set it, or use --store"
        )
    return path, form.format(bucket)


def _connect(call: Invocation, *, long_work: bool, whole_store: bool = False) -> Connection:
    path, store = address(call, call.require_path())
    plain, root = resolve_database(path, store, store_options(call, store or path, long_work=long_work))
    if not root and not whole_store:
        raise InvalidRequest(f"{path!r} names a whole store; a database needs a path inside it")
    main, main_requests = _counted(call, plain, long_work=long_work)
    if call.wal_store is None:
        return Connection(root, main, None, main_requests, None)
    wal_options = store_options(call, call.wal_store, long_work=long_work)
    wal, wal_requests = _counted(call, resolve(call.wal_store, **wal_options), long_work=long_work)  # type: ignore[arg-type]
    return Connection(root, main, wal, main_requests, wal_requests)


def store_options(call: Invocation, url: str, *, long_work: bool = True) -> Mapping[str, OptionValue]:
    """The store options of the call; for a remote store with timeouts, unless the call has its own."""
    given: dict[str, OptionValue] = {}
    for text in call.store_options:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidRequest(
                f"--store-option {text!r} is not NAME=VALUE, such as endpoint=http://127.0.0.1:9000"
            )
        if name in SECRET_OPTIONS or (name == "commit_log" and passwords_of(value)):
            raise InvalidRequest(
                f"--store-option {name} would show a secret to every user of this machine; "
                "set it in the environment, or in a file for --env-file"
            )
        given[name] = value
    if url.partition("://")[0] not in SERVICE_OF_SCHEME:
        return given
    defaults: dict[str, OptionValue] = {"connect_timeout": min(_LONGEST_CONNECT_S, call.timeout_s)}
    if not long_work:
        defaults["read_timeout"] = call.timeout_s
    if any(os.environ.get(name, "").lower() in ("1", "true") for name in _ALLOW_HTTP):
        # The client reads these variables itself, but ignores them if it is given timeouts.
        defaults["allow_http"] = True
    return {**defaults, **given}


def _counted(call: Invocation, store: ObjectStore, *, long_work: bool) -> tuple[ObjectStore, CountingStore]:
    """The store with retries, and its request counter. The counter is below the retries and counts every attempt.

    The engine adds no retries of its own to a store that is a `RetryingStore`.
    """
    counting = CountingStore(store.inner if isinstance(store, RetryingStore) else store, component="cli")
    policy = RetryPolicy() if long_work else RetryPolicy(deadline_s=call.timeout_s)
    return RetryingStore(counting, policy=policy), counting


def find_databases(store: ObjectStore, prefix: str = "") -> Iterator[str]:
    """The paths below `prefix` ("": the whole store) that have a database, in the order of the listing.

    Lists the start of each folder of each database and skips the rest: about six listings per database of any size.
    Includes the path of a destroyed database until its last object is deleted.
    """
    after: str | None = None
    found: set[str] = set()
    while True:
        skipped: str | None = None
        for meta in store.list(prefix, after=after):
            after = meta.path
            root, folder = _split(meta.path)
            if folder is None:
                continue
            if root not in found and root and DbPaths(root).parse_manifest(meta.path) is not None:
                found.add(root)
                yield root
            skipped = f"{root}/{folder}/{_LAST_NAME}" if root else f"{folder}/{_LAST_NAME}"
            break
        if skipped is None:
            return
        # Never backward, also after a foreign name that sorts after `_LAST_NAME`: otherwise the loop would not end.
        after = max(skipped, after or "")


def _split(path: str) -> tuple[str, str | None]:
    """The database that an object at this path belongs to, and its folder there; None for a foreign object."""
    parts = path.split("/")
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] in _FOLDERS:
            return "/".join(parts[:index]), parts[index]
    return "", None
