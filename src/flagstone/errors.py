"""The six kinds of error, each answering one question: what should the caller do now?

    FlagstoneError
    ├── TransactionConflict   retry the transaction
    ├── Closed                reopen (`reason` says why: "clean", "fenced" or "failed")
    ├── Unavailable           back off and try again; the store did not answer
    ├── InvalidRequest        fix the call, the setting or the credentials
    ├── CorruptData           call the operator: stored bytes are wrong (`object`, `offset`)
    └── InternalError         report a bug

Subclasses are defined beside the code that raises them; callers need only these six. Code that has more context
(path, manifest id, epoch) adds it with `add_note`.
"""

from __future__ import annotations

from typing import Any, Literal

CloseReason = Literal["clean", "fenced", "failed"]


class FlagstoneError(Exception):
    """Base class of all errors that Flagstone raises on purpose."""


class TransactionConflict(FlagstoneError):
    """Another commit touched the same keys first: retry the transaction."""


class Closed(FlagstoneError):
    """The database was closed; `reason` says whether cleanly, by a newer writer, or by a failure."""

    def __init__(self, message: str, *, reason: CloseReason = "clean") -> None:
        super().__init__(message)
        self.reason: CloseReason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_closed, (type(self), str(self), self.reason))


class Unavailable(FlagstoneError):
    """The object store did not answer in time: back off and try again."""


class InvalidRequest(FlagstoneError, ValueError):
    """The call, a setting or a credential is wrong: fix it and call again."""


class CorruptData(FlagstoneError):
    """Stored bytes do not match the format or a checksum: an operator must examine them.

    `object` is the path of the damaged object and `offset` the first byte in it that is known to be wrong; None if
    the raising layer does not know it.
    """

    def __init__(self, problem: str, *, object: str | None = None, offset: int | None = None) -> None:  # noqa: A002
        self.problem = problem
        self.object = object
        self.offset = offset
        super().__init__(problem)

    def __str__(self) -> str:
        where = self.object or ""
        if self.offset is not None:
            where += f" at byte {self.offset}" if where else f"byte {self.offset}"
        return f"{where}: {self.problem}" if where else self.problem

    def within(self, object: str | None, base: int = 0) -> CorruptData:  # noqa: A002
        """The same problem with the object's path, and with the offset `base` at which the bytes begin in it."""
        offset = base if self.offset is None else base + self.offset
        return type(self)(self.problem, object=object, offset=offset)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_corrupt, (type(self), self.problem, self.object, self.offset))


class InternalError(FlagstoneError):
    """An internal invariant of Flagstone is broken: please report it."""


def _rebuild_closed(kind: type[Closed], message: str, reason: CloseReason) -> Closed:
    return kind(message, reason=reason)


def _rebuild_corrupt(
    kind: type[CorruptData], problem: str, path: str | None, offset: int | None
) -> CorruptData:
    return kind(problem, object=path, offset=offset)
