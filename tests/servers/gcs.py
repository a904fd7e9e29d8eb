"""A stand-in for Google Cloud Storage: the part of its XML API that an object store client uses, in a thread.

It implements generation preconditions: `x-goog-if-generation-match` is checked and applied under one
lock. It is our own model of the service, so tests with it prove nothing about the service itself.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from flagstone.runtime.clock import SYSTEM_CLOCK

BUCKET = "flagstone-test"
PAGE_KEYS = 1000
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True)
class Blob:
    """One generation of one object."""

    data: bytes
    generation: int
    modified_ms: int
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{self.generation:x}"'

    @property
    def modified(self) -> datetime:
        return datetime.fromtimestamp(self.modified_ms / 1000, UTC)


@dataclass
class Bucket:
    """The objects of the server; `lock` guards each read-check-write."""

    blobs: dict[str, Blob] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1_000_000))

    def store(self, key: str, data: bytes, headers: dict[str, str]) -> Blob:
        blob = Blob(data, next(self.numbers), SYSTEM_CLOCK.now_ms(), headers)
        self.blobs[key] = blob
        return blob


class GcsServer:
    """The running stand-in; leave the `with` block to stop it."""

    def __init__(self) -> None:
        self.bucket = Bucket()
        handler = type("Handler", (_Handler,), {"bucket": self.bucket})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"gs://{BUCKET}"

    def options(self) -> dict[str, str | bool]:
        # With any other account the client would ask the cloud's metadata service for a token.
        account = {
            "gcs_base_url": f"http://127.0.0.1:{self._server.server_address[1]}",
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"service_account_key": json.dumps(account), "allow_http": True}


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        _, key, query = self._address()
        if not key:
            self._list(query)
            return
        blob = self.bucket.blobs.get(key)
        if blob is None:
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
        elif self.headers.get("If-None-Match") == blob.etag:
            self._answer(HTTPStatus.NOT_MODIFIED, headers=_described(blob))
        elif self.headers.get("If-Match") not in (None, blob.etag, "*"):
            self._refuse(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        else:
            self._send_blob(blob)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        body = self._body()
        _, key, query = self._address()
        if "uploadId" in query:
            self.bucket.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(headers={"ETag": f'"{query["partNumber"]}"'})
            return
        kept = {
            name: value
            for name, value in self.headers.items()
            if name.lower().startswith("x-goog-meta-") or name.lower() == "content-type"
        }
        wanted = self.headers.get("x-goog-if-generation-match")
        source = self.headers.get("x-goog-copy-source")
        with self.bucket.lock:
            present = self.bucket.blobs.get(key)
            if wanted is not None and int(wanted) != (present.generation if present else 0):
                self._refuse(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
                return
            if source is not None:
                original = self.bucket.blobs.get(unquote(source).lstrip("/").partition("/")[2])
                if original is None:
                    self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
                    return
                body = original.data
            blob = self.bucket.store(key, body, kept)
        self._answer(headers={"ETag": blob.etag, "x-goog-generation": str(blob.generation)})

    def do_POST(self) -> None:
        self._body()
        _, key, query = self._address()
        if "uploads" in query:
            upload = str(next(self.bucket.numbers))
            self.bucket.uploads[upload] = {}
            self._answer_xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            return
        parts = self.bucket.uploads.pop(query["uploadId"])
        with self.bucket.lock:
            blob = self.bucket.store(key, b"".join(parts[number] for number in sorted(parts)), {})
        self._answer_xml(
            "CompleteMultipartUploadResult",
            f"<ETag>{escape(blob.etag)}</ETag>",
            headers={"x-goog-generation": str(blob.generation)},
        )

    def do_DELETE(self) -> None:
        _, key, query = self._address()
        if "uploadId" in query:
            self.bucket.uploads.pop(query["uploadId"], None)
            self._answer(HTTPStatus.NO_CONTENT)
            return
        with self.bucket.lock:
            removed = self.bucket.blobs.pop(key, None)
        if removed is None:
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
        else:
            self._answer(HTTPStatus.NO_CONTENT)

    def _address(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        return bucket, key, dict(parse_qsl(parts.query, keep_blank_values=True))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send_blob(self, blob: Blob) -> None:
        size = len(blob.data)
        wanted = RANGE.fullmatch(self.headers.get("Range") or "")
        if wanted is None or self.command == "HEAD":
            self._answer(body=blob.data, headers=_described(blob))
            return
        first, last = wanted.groups()
        start = max(size - int(last), 0) if not first else int(first)
        stop = size if not first or not last else min(int(last) + 1, size)
        if start >= size:
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
            return
        headers = {**_described(blob), "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        self._answer(HTTPStatus.PARTIAL_CONTENT, body=blob.data[start:stop], headers=headers)

    def _list(self, query: dict[str, str]) -> None:
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter")
        after = query.get("continuation-token") or query.get("start-after") or ""
        page = int(query.get("max-keys", PAGE_KEYS))
        with self.bucket.lock:
            found = sorted(
                (key, blob)
                for key, blob in self.bucket.blobs.items()
                if key.startswith(prefix) and key > after
            )
        entries: list[str] = []
        folders: dict[str, None] = {}
        last = ""
        for key, blob in found:
            if len(entries) + len(folders) >= page:
                break
            last = key
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
            else:
                entries.append(_list_entry(key, blob))
        truncated = bool(found) and last != found[-1][0]
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if truncated else ""
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders
        )
        flag = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
        self._answer_xml("ListBucketResult", flag + token + "".join(entries) + prefixes)

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._answer_xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status=status)

    def _answer_xml(
        self,
        element: str,
        content: str,
        *,
        status: HTTPStatus = HTTPStatus.OK,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._answer(status, body=f"<{element}>{content}</{element}>".encode(), headers=headers)

    def _answer(
        self,
        status: HTTPStatus = HTTPStatus.OK,
        *,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status != HTTPStatus.NOT_MODIFIED:
            self.wfile.write(body)
        self.wfile.flush()


def _described(blob: Blob) -> dict[str, str]:
    return {
        **blob.headers,
        "ETag": blob.etag,
        "x-goog-generation": str(blob.generation),
        "Last-Modified": format_datetime(blob.modified, usegmt=True),
    }


def _list_entry(key: str, blob: Blob) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><Generation>{blob.generation}</Generation>"
        f"<LastModified>{blob.modified:%Y-%m-%dT%H:%M:%S}.{blob.modified_ms % 1000:03}Z</LastModified>"
        f"<ETag>{escape(blob.etag)}</ETag><Size>{len(blob.data)}</Size></Contents>"
    )
