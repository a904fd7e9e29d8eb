"""What obstore's exceptions mean in terms of the port.

obstore has no status codes, and its messages run over many lines with whole requests in them. Here the status
is read from the text, and only the first line goes on, without queries (they may be signed) and secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from flagstone.errors import FlagstoneError, InvalidRequest, Unavailable
from flagstone.store.port import AccessRefused, ObjectChanged, ObjectExists, ObjectMissing

RAISED: Final = (BaseError, OSError, NotImplementedError, ValueError)
"""Everything that obstore's calls raise on purpose."""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_QUERY: Final = re.compile(r"\?[^\s\"']*")
_USER: Final = re.compile(r"://[^/\s@]*@")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "bucket does not exist")
_TRANSIENT: Final = frozenset([408, 409, 425, 429])
_PASSING: Final = ("RequestTimeout", "SlowDown")
_RANGE_ERRORS: Final = ("status code: 416", "CONTENT_RANGE", "InvalidRange", "Requested range")
_REFUSED: Final = "; the credentials are wrong, have expired, or do not allow this"
_WRITING: Final = frozenset(["put", "put_if_absent", "list"])


def first_line(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """The part of the message that people may see."""
    line = str(error).partition("\n")[0].partition("<?xml")[0].strip(" :")
    line = _USER.sub("://", _QUERY.sub("", line))
    for secret in secrets:
        if len(secret) > 3:
            line = line.replace(secret, "***")
    return line[:500]


def is_past_the_end(error: BaseException) -> bool:
    """Whether the range asked for may lie past the object's end; the object's size tells for sure."""
    return isinstance(error, GenericError) and any(mark in str(error) for mark in _RANGE_ERRORS)


def outcome(error: BaseException, verb: str, path: str, *, secrets: Iterable[str] = ()) -> FlagstoneError:
    """The port's word for what happened to `verb` at `path`."""
    text = str(error)
    told = f"{verb} of {path or 'the store'} failed: {first_line(error, secrets)}"
    if any(mark in text for mark in _NO_BUCKET):
        return InvalidRequest(f"{told}; the bucket or container does not exist")
    if isinstance(error, FileNotFoundError):
        if verb == "put_if_match":
            return ObjectChanged(path)
        if verb in _WRITING:
            return InvalidRequest(f"{told}; the bucket or container does not exist")
        return ObjectMissing(path)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        match verb:
            case "put_if_absent":
                return ObjectExists(path)
            case "put_if_match":
                return ObjectChanged(path)
            case _:
                return Unavailable(f"{told}; it changed meanwhile")
    if isinstance(error, GenericError):
        return _generic(text, told)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return AccessRefused(f"{told}{_REFUSED}")
    if isinstance(error, OSError):
        return Unavailable(told)
    return InvalidRequest(told)


def _generic(text: str, told: str) -> FlagstoneError:
    if "builder error" in text:
        return InvalidRequest(f"{told}; plain http:// needs the option allow_http=True")
    anonymous = "/latest/api/token" in text or "metadata.google.internal" in text
    if anonymous:
        told += "; no credentials were given, and this machine has no identity of its own"
    status = _STATUS.search(text)
    if status is not None:
        code = int(status[1])
        if code in (401, 403):
            return AccessRefused(told if anonymous else told + _REFUSED)
        ours = 400 <= code < 500 and code not in _TRANSIENT and not any(mark in text for mark in _PASSING)
        if ours or code == 501:
            return AccessRefused(told) if anonymous else InvalidRequest(told)
    return Unavailable(told)
