"""Objects on S3, Google Cloud Storage or Azure Blob Storage, through obstore's blocking calls.

obstore's own retries are off: a retried conditional write can lose against itself, and only `RetryingStore`
recognises that by the write's token. `resolve` wraps this store in one. Uploads in parts are the exception. obstore
sends the parts in the background, and only obstore can send one of them again.

A native client does not survive a fork: in the child of a process that has used one every call hangs. In such a
child the store raises `InvalidRequest` instead.

obstore's exceptions have no status codes, and their messages hold whole requests over many lines. `outcome` reads
the status from the text. Only the first line goes into our message, without queries (they may be signed) and
without secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from obstore import open_writer
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from flagstone.errors import FlagstoneError, InvalidRequest, Unavailable
from flagstone.runtime.pool import shared_pool
from flagstone.store.port import (
    AccessRefused,
    ObjectChanged,
    ObjectExists,
    ObjectMeta,
    ObjectMissing,
    ObjectVersion,
    Range,
    StoredObject,
    Upload,
    check_path,
    check_prefix,
    check_range,
    cut_pieces,
    plan_fetches,
)
from flagstone.store.remote_options import (
    CLIENT_OPTIONS,
    SECRET_OPTIONS,
    Options,
    OptionValue,
    check_options,
    client_value,
    parse_remote_url,
)
from flagstone.store.remote_upload import RemoteUpload
from flagstone.store.unanswered import REQUESTS, Request

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, PutMode, PutResult, WritableFile
    from obstore import ObjectMeta as RawMeta

TOKEN_ATTRIBUTE: Final = "slatedbputid"  # noqa: S105 - the name under which SlateDB keeps its own
RAISED: Final = (BaseError, OSError, NotImplementedError, ValueError)
"""Every exception that obstore documents for its calls."""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_QUERY: Final = re.compile(r"\?[^\s\"']*")
_USER: Final = re.compile(r"://[^/\s@]*@")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "bucket does not exist")
_TRANSIENT: Final = frozenset([408, 409, 425, 429])
_PASSING: Final = ("RequestTimeout", "SlowDown")
_RANGE_ERRORS: Final = ("status code: 416", "CONTENT_RANGE", "InvalidRange", "Requested range")
_REFUSED: Final = "; the credentials are wrong, have expired, or do not allow this"
_WRITING: Final = frozenset(["put", "upload", "put_if_absent", "list"])
_LIST_PAGE: Final = 1000
_SERVER: Final = re.compile(r"uri: Some\(\s*https?://(?:[^/@\s]*@)?([^/?,\s]+)")
_SYSTEM_MESSAGE: Final = re.compile(r'Os \{[^}]*message: "([^"]+)"')
_NO_RETRIES: Final = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
_PART_RETRIES: Final = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
_S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")

_Client = S3Store | GCSStore | AzureStore
_T = TypeVar("_T")


class RemoteStore:
    """A bucket, or a folder of one, as an object store.

    Options are those of `remote_options`; the others come from the environment, as the service's own tools read
    it. The client opens on first use, once per process.

    Pickles as URL and options. Secret options are left out unless `pickle_secrets` is set; the unpickled store
    takes them from the environment of its process.
    """

    def __init__(self, url: str, *, options: Options | None = None, pickle_secrets: bool = False) -> None:
        self._address = parse_remote_url(url)
        self._options: dict[str, OptionValue] = dict(options or {})
        check_options(self._address.service, self._options)
        self._pickle_secrets = pickle_secrets
        self._withheld: tuple[str, ...] = ()
        self._client: _Client | None = None
        self._uploader: _Client | None = None
        self._client_pid = 0

    @property
    def url(self) -> str:
        return str(self._address)

    def __repr__(self) -> str:
        shown = {name: "***" if name in SECRET_OPTIONS else value for name, value in self._options.items()}
        return f"RemoteStore({self.url!r}, options={shown})"

    def __reduce__(self) -> tuple[object, tuple[str, dict[str, OptionValue], bool, tuple[str, ...]]]:
        options, withheld = self._options, self._withheld
        if not self._pickle_secrets:
            withheld = tuple(sorted({*withheld, *(SECRET_OPTIONS & options.keys())}))
            options = {name: value for name, value in options.items() if name not in SECRET_OPTIONS}
        return (_reopen, (self.url, options, self._pickle_secrets, withheld))

    def get(self, path: str) -> StoredObject:
        return self.ask("get", check_path(path), lambda client: self._fetched(path, client.get(path)))

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        if self._address.service == "gcs" or known.etag is None:
            # GCS derives entity tags from the bytes; only generations distinguish two writes of the same bytes.
            return None if self.head(path).version == known else self.get(path)
        etag = known.etag

        def request(client: _Client) -> StoredObject | None:
            try:
                return self._fetched(path, client.get(path, options={"if_none_match": etag}))
            except NotModifiedError:
                return None

        return self.ask("get_if_changed", check_path(path), request)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        check_range(path, start, stop)
        if start == stop:
            self.head(path)
            return b""

        def request(client: _Client) -> bytes | None:
            try:
                return bytes(client.get_range(path, start=start, end=stop))
            except RAISED as error:
                if is_past_the_end(error):
                    return None
                raise

        piece = self.ask("get_range", check_path(path), request)
        if piece is None and self.head(path).size > start:
            raise Unavailable(f"get_range of {path} was refused, though it has bytes {start}..{stop}")
        return piece or b""

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        for start, stop in ranges:
            check_range(path, start, stop)
        fetches = plan_fetches(ranges)
        if not fetches and ranges:
            self.head(path)
        fetched = shared_pool().map_ordered(lambda fetch: self.get_range(path, *fetch), fetches)
        return cut_pieces(ranges, fetches, fetched)

    def get_tail(self, path: str, length: int) -> StoredObject:
        if self._address.service != "azure" and length > 0:

            def request(client: _Client) -> StoredObject | None:
                try:
                    return self._fetched(path, client.get(path, options={"range": {"suffix": length}}))
                except RAISED as error:
                    if is_past_the_end(error):
                        return None
                    raise

            found = self.ask("get_tail", check_path(path), request)
            if found is not None:
                return found
        meta = self.head(path)
        start = max(meta.size - max(length, 0), 0)
        if start == meta.size:
            return StoredObject(b"", meta)
        options: GetOptions = {"range": (start, meta.size), "if_match": meta.version.etag}
        return self.ask(
            "get_tail", path, lambda client: self._fetched(path, client.get(path, options=options))
        )

    def head(self, path: str) -> ObjectMeta:
        # obstore's `head` leaves out the attributes, and with them the token.
        return self.ask(
            "head",
            check_path(path),
            lambda client: self._described(path, client.get(path, options={"head": True})),
        )

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        folder = check_prefix(prefix).rstrip("/") or None
        if self._lists_in_order():
            return self._listed(prefix, folder, after)
        # Such a service would skip the wrong paths, so `after` is applied here.
        metas = self._listed(prefix, folder, None)
        kept = (meta for meta in metas if after is None or meta.path > after)
        return iter(sorted(kept, key=lambda meta: meta.path))

    def _lists_in_order(self) -> bool:
        """Whether the service lists in path order: directory buckets and some S3-compatible services do not."""
        if self._address.service != "s3":
            return True
        elsewhere = "endpoint" in self._options or any(name in os.environ for name in _S3_ENDPOINTS)
        return not (elsewhere or self._options.get("s3_express") or self._address.bucket.endswith("--x-s3"))

    def put(self, path: str, data: bytes) -> ObjectVersion:
        return self.ask(
            "put",
            check_path(path),
            lambda client: self._version(client.put(path, bytes(data), mode="overwrite")),
        )

    def upload(self, path: str) -> Upload:
        return RemoteUpload(self, check_path(path))

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        return self._put_conditionally("put_if_absent", path, data, "create", token)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        mode: dict[str, str] = {}
        if version.etag is not None:
            mode["e_tag"] = version.etag
        if version.generation is not None:
            mode["version"] = version.generation
        if not mode or (self._address.service == "gcs" and version.generation is None):
            raise InvalidRequest(
                f"the version of {path} came from a listing; read the object before replacing it"
            )
        return self._put_conditionally("put_if_match", path, data, mode, token)  # type: ignore[arg-type]

    def copy(self, source: str, destination: str) -> None:
        check_path(destination)
        self.ask("copy", check_path(source), lambda client: client.copy(source, destination))

    def delete(self, path: str) -> None:
        try:
            self.ask("delete", check_path(path), lambda client: client.delete(path))
        except ObjectMissing:
            return

    def delete_many(self, paths: Iterable[str]) -> None:
        wanted = [check_path(path) for path in paths]
        if not wanted:
            return
        try:
            self.ask("delete_many", wanted[0], lambda client: client.delete(wanted))
        except ObjectMissing:
            # The service does not report which objects it skipped after the first missing one.
            shared_pool().map_ordered(self.delete, wanted)

    def _put_conditionally(
        self, verb: str, path: str, data: bytes, mode: PutMode, token: str | None
    ) -> ObjectVersion:
        attributes: dict[str, str] | None = None if token is None else {TOKEN_ATTRIBUTE: token}
        return self.ask(
            verb,
            check_path(path),
            lambda client: self._version(
                # The condition would not hold for an upload in parts.
                client.put(path, bytes(data), mode=mode, attributes=attributes, use_multipart=False)
            ),
        )

    def _listed(self, prefix: str, folder: str | None, offset: str | None) -> Iterator[ObjectMeta]:
        pages = self.ask(
            "list",
            prefix,
            lambda client: iter(client.list(folder, offset=offset or None, chunk_size=_LIST_PAGE)),
        )
        while True:
            page = self.ask("list", prefix, lambda _: next(pages, None))
            if page is None:
                return
            for raw in page:
                yield self._meta(raw["path"], raw, None)

    def _fetched(self, path: str, answer: GetResult) -> StoredObject:
        meta = self._described(path, answer)
        return StoredObject(bytes(answer.bytes()), meta)

    def _described(self, path: str, answer: GetResult) -> ObjectMeta:
        return self._meta(path, answer.meta, answer.attributes.get(TOKEN_ATTRIBUTE))

    def _meta(self, path: str, raw: RawMeta, token: str | None) -> ObjectMeta:
        modified_ms = int(raw["last_modified"].timestamp() * 1000)
        return ObjectMeta(path, raw["size"], modified_ms, self._version(raw), token)

    def _version(self, raw: PutResult | RawMeta) -> ObjectVersion:
        if self._address.service == "gcs":
            return ObjectVersion(etag=raw["e_tag"], generation=raw["version"])
        # A condition on S3 and Azure does not use version ids, and not every answer has them.
        return ObjectVersion(etag=raw["e_tag"])

    def ask(self, verb: str, path: str, request: Callable[[_Client], _T]) -> _T:
        """What `request` returns; raises the errors of the port in place of obstore's."""
        client = self._opened()
        try:
            with REQUESTS.watched(Request(verb, path, self.url)):
                return request(client)
        except RAISED as error:
            problem = outcome(error, verb, path, secrets=self._secrets())
        if self._withheld and isinstance(problem, InvalidRequest | Unavailable):
            problem.add_note(
                f"the pickled store does not contain {', '.join(self._withheld)}; set them in the environment, "
                "or open the store with pickle_secrets=True"
            )
        # Outside the handler, so that the original error with its secrets does not become the context.
        raise problem

    def open_writer(self, path: str, token: str, *, part_bytes: int, max_concurrency: int) -> WritableFile:
        """A writer that sends parts in the background, each again until it succeeds. Makes no request."""
        self._opened()
        if self._uploader is None:
            self._uploader = self._open(retry_config=_PART_RETRIES)
        return open_writer(
            self._uploader,
            path,
            attributes={TOKEN_ATTRIBUTE: token},
            buffer_size=part_bytes,
            max_concurrency=max_concurrency,
        )

    def _opened(self) -> _Client:
        if _fork.forbids_io:
            raise InvalidRequest(
                "this process was forked from one that has used a remote store, whose client hangs after a fork; "
                "start processes with the 'spawn' or 'forkserver' method, or fork before the first use"
            )
        _fork.did_io = True
        client = self._client
        if client is None or self._client_pid != os.getpid():
            client = self._client = self._open(retry_config=_NO_RETRIES)
            self._uploader = None
            self._client_pid = os.getpid()
        return client

    def _open(self, *, retry_config: Any) -> _Client:
        address = self._address
        http = {n: client_value(n, v) for n, v in self._options.items() if n in CLIENT_OPTIONS}
        config: dict[str, Any] = {n: v for n, v in self._options.items() if n not in CLIENT_OPTIONS}
        if address.account is not None:
            config.setdefault("account_name", address.account)
        opener: Callable[..., _Client] = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}[
            address.service
        ]
        try:
            return opener(
                address.bucket,
                prefix=address.prefix or None,
                client_options=http or None,  # given any, the client ignores the environment's http options
                retry_config=retry_config,
                **config,
            )
        except (*RAISED, TypeError) as error:
            problem = f"cannot open {self.url}: {first_line(error, self._secrets())}"
        raise InvalidRequest(problem)

    def _secrets(self) -> tuple[str, ...]:
        return tuple(str(value) for name, value in self._options.items() if name in SECRET_OPTIONS)


def _reopen(
    url: str, options: Mapping[str, OptionValue], pickle_secrets: bool, withheld: tuple[str, ...]
) -> RemoteStore:
    store = RemoteStore(url, options=options, pickle_secrets=pickle_secrets)
    store._withheld = withheld  # noqa: SLF001
    return store


class _Fork:
    """Whether this process has used a native client, and whether its parent had before the fork."""

    did_io = False
    forbids_io = False

    def in_child(self) -> None:
        self.forbids_io = self.forbids_io or self.did_io


_fork = _Fork()
os.register_at_fork(after_in_child=_fork.in_child)


def first_line(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """The first line of the message, without queries, user names and secrets."""
    line = str(error).partition("\n")[0].partition("<?xml")[0].strip(" :")
    line = _USER.sub("://", _QUERY.sub("", line))
    for secret in secrets:
        if len(secret) > 3:
            line = line.replace(secret, "***")
    return line[:500]


def network_cause(text: str) -> str | None:
    """Why no connection to the server was made, in a few words; None if that was not the problem.

    The client names the cause only in the nested description below its message.
    """
    if "HttpError" not in text:
        return None
    server = _SERVER.search(text)
    where = f" ({server[1]})" if server else ""
    if '"dns error"' in text:
        return f"no such host{where}"
    if "kind: Timeout" in text or "TimedOut" in text:
        return f"no answer in time{where}"
    system = _SYSTEM_MESSAGE.search(text)
    if system is not None:
        return f"{system[1].lower()}{where}"
    return f"no connection{where}" if "kind: Connect" in text else None


def is_past_the_end(error: BaseException) -> bool:
    """Whether the requested range may lie past the object's end; the caller checks the object's size."""
    return isinstance(error, GenericError) and any(mark in str(error) for mark in _RANGE_ERRORS)


def outcome(error: BaseException, verb: str, path: str, *, secrets: Iterable[str] = ()) -> FlagstoneError:
    """The error of `flagstone.store.port` for a failed `verb` at `path`."""
    text = str(error)
    cause = network_cause(text)
    failed = f"{verb} of {path or 'the store'} failed"
    problem = f"{failed}: {first_line(error, secrets)}" if cause is None else f"{cause}: {failed}"
    if any(mark in text for mark in _NO_BUCKET):
        return InvalidRequest(f"{problem}; the bucket or container does not exist")
    if isinstance(error, FileNotFoundError):
        if verb == "put_if_match":
            return ObjectChanged(path)
        if verb in _WRITING:
            return InvalidRequest(f"{problem}; the bucket or container does not exist")
        return ObjectMissing(path)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        match verb:
            case "put_if_absent":
                return ObjectExists(path)
            case "put_if_match":
                return ObjectChanged(path)
            case _:
                return Unavailable(f"{problem}; the object changed during the request")
    if isinstance(error, GenericError):
        return _generic(text, problem)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return AccessRefused(f"{problem}{_REFUSED}")
    if isinstance(error, OSError):
        return Unavailable(problem)
    return InvalidRequest(problem)


def _generic(text: str, problem: str) -> FlagstoneError:
    if "builder error" in text:
        return InvalidRequest(f"{problem}; plain http:// needs the option allow_http=True")
    anonymous = "/latest/api/token" in text or "metadata.google.internal" in text
    if anonymous:
        problem += "; no credentials were given, and this machine has no identity of its own"
    status = _STATUS.search(text)
    if status is not None:
        code = int(status[1])
        if code in (401, 403):
            return AccessRefused(problem if anonymous else problem + _REFUSED)
        ours = 400 <= code < 500 and code not in _TRANSIENT and not any(mark in text for mark in _PASSING)
        if ours or code == 501:
            return AccessRefused(problem) if anonymous else InvalidRequest(problem)
    return Unavailable(problem)
