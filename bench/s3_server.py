"""A simulated S3 server on this machine, which gives two engines the same latency.

`python -m bench.s3_server standard|express` serves one bucket from memory on a free port of the loopback, prints the port
and ends when its standard input does. Every request waits as in `bench.latency_store`; a write takes effect in
the middle. Requests are counted by kind. It implements what the two engines use: objects, ranges, conditions, listings,
bulk deletions, multipart uploads. It does not check signatures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from itertools import count
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from bench.harness import sized
from bench.latency_store import EXPRESS, STANDARD, Profile, Wait

PROFILES: Final = {"standard": STANDARD, "express": EXPRESS}
COUNTS: Final = "/-/counts"
"""A path outside of any bucket: returns the request counts, at once and uncounted."""
PAGE: Final = 1000
HEAD_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Stored:
    """One object."""

    data: bytes
    etag: str
    modified: datetime
    attributes: dict[str, str]

    def headers(self) -> dict[str, str]:
        changed = format_datetime(self.modified, usegmt=True)
        return {"etag": self.etag, "last-modified": changed, "accept-ranges": "bytes", **self.attributes}


@dataclass(frozen=True)
class Request:
    """One request of a client."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        """The kind by which it is billed and waits."""
        if self.method == "GET":
            return "list" if "list-type" in self.query else "get"
        if self.method == "DELETE" or "delete" in self.query:
            return "delete"
        return {"HEAD": "head"}.get(self.method, "put")


@dataclass(frozen=True)
class Answer:
    """The response."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


MISSING: Final = Answer(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
REFUSED: Final = Answer(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")


class Bucket:
    """Objects and unfinished uploads: the effect of requests, without waiting."""

    def __init__(self) -> None:
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = {}
        self._numbers = count(1)

    def answer(self, request: Request) -> Answer:
        """Carry out a request."""
        if not request.key:
            return self._delete_many(request.body) if request.method == "POST" else self._list(request.query)
        if "uploads" in request.query or "uploadId" in request.query:
            return self._in_parts(request)
        if request.method == "PUT":
            return self._put(request)
        if request.method == "DELETE":
            self._objects.pop(request.key, None)
            return Answer(204)
        return self._get(request)

    def _get(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return MISSING
        if request.headers.get("if-none-match") == found.etag:
            return Answer(304, found.headers())
        if request.headers.get("if-match", found.etag) != found.etag:
            return REFUSED
        wanted, size = request.headers.get("range"), len(found.data)
        if wanted is None:
            return Answer(200, found.headers(), found.data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(size - int(last), 0)
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            return Answer(416, body=b"<Error><Code>InvalidRange</Code></Error>")
        place = {"content-range": f"bytes {start}-{stop - 1}/{size}"}
        return Answer(206, {**found.headers(), **place}, found.data[start:stop])

    def _put(self, request: Request) -> Answer:
        source = request.headers.get("x-amz-copy-source")
        if source is None:
            return self._store(request, request.body, _attributes(request.headers))
        copied = self._objects.get(unquote(source).lstrip("/").partition("/")[2])
        if copied is None:
            return MISSING
        stored = self._store(request, copied.data, copied.attributes)
        text = f"<CopyObjectResult><ETag>{escape(stored.headers['etag'])}</ETag></CopyObjectResult>"
        return replace(stored, body=text.encode())

    def _store(self, request: Request, data: bytes, attributes: dict[str, str]) -> Answer:
        present = self._objects.get(request.key)
        if request.headers.get("if-none-match") == "*" and present is not None:
            return REFUSED
        wanted = request.headers.get("if-match")
        if wanted is not None and (present is None or present.etag != wanted):
            return REFUSED
        stored = Stored(data, f'"{next(self._numbers):x}"', datetime.now(UTC), attributes)
        self._objects[request.key] = stored
        return Answer(200, {"etag": stored.etag})

    def _in_parts(self, request: Request) -> Answer:
        if "uploads" in request.query:
            upload = f"upload-{next(self._numbers)}"
            self._uploads[upload] = (_attributes(request.headers), {})
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return Answer(body=text.encode())
        upload = request.query["uploadId"]
        if request.method == "PUT":
            self._uploads[upload][1][int(request.query["partNumber"])] = request.body
            return Answer(200, {"etag": f'"{next(self._numbers):x}"'})
        attributes, parts = self._uploads.pop(upload)
        if request.method == "DELETE":
            return Answer(204)
        stored = self._store(request, b"".join(parts[number] for number in sorted(parts)), attributes)
        if stored.status != 200:
            return stored
        etag = escape(stored.headers["etag"])
        text = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        return Answer(body=text.encode())

    def _delete_many(self, body: bytes) -> Answer:
        keys = [
            found.text or "" for found in ET.fromstring(body).iter() if found.tag.rpartition("}")[2] == "Key"
        ]
        for key in keys:
            self._objects.pop(key, None)
        gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return Answer(body=f"<DeleteResult>{gone}</DeleteResult>".encode())

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        after = query.get("continuation-token") or query.get("start-after", "")
        found = [key for key in sorted(self._objects) if key.startswith(prefix) and key > after]
        folders: dict[str, None] = {}
        if delimiter:
            cut = {key: key[len(prefix) :].partition(delimiter) for key in found}
            folders = dict.fromkeys(prefix + head + delimiter for head, mark, _ in cut.values() if mark)
            found = [key for key in found if not cut[key][1]]
        page, more = found[:PAGE], found[PAGE:]
        parts = [f"<IsTruncated>{'true' if more else 'false'}</IsTruncated><KeyCount>{len(page)}</KeyCount>"]
        if more:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for key in page:
            one = self._objects[key]
            changed = one.modified.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            parts.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
                f"<ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size></Contents>"
            )
        parts += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
        return Answer(body=f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode())


def _attributes(headers: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name.startswith("x-amz-meta-")}


class Server:
    """A bucket behind HTTP and the latency of a profile."""

    def __init__(self, profile: Profile, *, seed: int = 0) -> None:
        self._profile = profile
        self._bucket = Bucket()
        self._source = random.Random(seed)
        self._counts: Counter[str] = Counter()

    async def listen(self) -> asyncio.Server:
        """Begin to serve, on a free port."""
        return await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=HEAD_BYTES)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await _read(reader)
                answer = await self._answer(request)
                length = len(answer.body)
                lines = [f"HTTP/1.1 {answer.status} -", f"content-length: {length}"]
                lines += [f"{name}: {text}" for name, text in answer.headers.items()]
                head = "\r\n".join([*lines, "", ""]).encode()
                writer.write(head if request.method == "HEAD" else head + answer.body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client closed the connection
        finally:
            writer.close()

    async def _answer(self, request: Request) -> Answer:
        if request.key == COUNTS:
            return Answer(body=json.dumps(self._counts).encode())
        kind = request.kind
        self._counts[kind] += 1
        self._counts["sent"] += len(request.body)
        wait: Wait = getattr(self._profile, kind)
        seconds = wait.draw(self._source) / self._profile.nearer
        if kind in ("put", "delete"):
            seconds += len(request.body) / self._profile.bytes_per_second
            await asyncio.sleep(seconds / 2)
            answer = self._bucket.answer(request)
            await asyncio.sleep(seconds / 2)
            return answer
        answer = self._bucket.answer(request)
        if request.method != "HEAD":
            self._counts["received"] += len(answer.body)
            seconds += len(answer.body) / self._profile.bytes_per_second
        await asyncio.sleep(seconds)
        return answer


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): text.strip() for name, _, text in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    place = urlsplit(target)
    key = COUNTS if target == COUNTS else unquote(place.path).lstrip("/").partition("/")[2]
    return Request(method, key, dict(parse_qsl(place.query, keep_blank_values=True)), headers, body)


async def main(name: str) -> None:
    profile = replace(PROFILES[name], nearer=sized(1.0, quickly=10.0))
    async with await Server(profile).listen() as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)  # connections are still open; do not wait for them


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
