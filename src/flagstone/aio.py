"""Flagstone for an event loop: `open`, `open_reader` and `open_feed` take the arguments of the blocking functions.

async with flagstone.aio.open("s3://bucket/shop") as db:
    await db.put(b"key", b"value", await_durable=True)
    async for key, value in db.scan(prefix=b"k"):
        ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from flagstone.db.aio.collection import AsyncCollection
from flagstone.db.aio.database import AsyncDb, AsyncSnapshot, AsyncTransaction
from flagstone.db.aio.reader import AsyncChangeFeed, AsyncDbReader, AsyncWalReader
from flagstone.db.open import open_database
from flagstone.db.reader.feed import open_feed as _open_feed
from flagstone.db.reader.reader import open_reader as _open_reader

__all__ = [
    "AsyncChangeFeed",
    "AsyncCollection",
    "AsyncDb",
    "AsyncDbReader",
    "AsyncSnapshot",
    "AsyncTransaction",
    "AsyncWalReader",
    "Opening",
    "open",
    "open_feed",
    "open_reader",
]


class _Closable(Protocol):
    def close(self) -> None: ...


class _AsyncClosable(Protocol):
    async def close(self) -> None: ...


_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Blocking = TypeVar("_Blocking", bound=_Closable)
_Async = TypeVar("_Async", bound=_AsyncClosable)


class Opening(Generic[_Async]):
    """A database that is being opened: `await` it, or use it with `async with`, which also closes it.

    Opening runs on another thread. If the task is cancelled meanwhile, the database is closed again once it is open.
    """

    def __init__(self, open_blocking: Callable[[], _Blocking], wrap: Callable[[_Blocking], _Async]) -> None:
        self._start: Callable[[], Any] = partial(_open, open_blocking, wrap)
        self._opened: _Async | None = None

    def __await__(self) -> Generator[Any, None, _Async]:
        opened: Generator[Any, None, _Async] = self._start().__await__()
        return opened

    async def __aenter__(self) -> _Async:
        self._opened = await self
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.close()


async def _open(open_blocking: Callable[[], _Blocking], wrap: Callable[[_Blocking], _Async]) -> _Async:
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, open_blocking)

    def close_unclaimed(done: asyncio.Future[_Blocking]) -> None:
        if not done.cancelled() and done.exception() is None:
            loop.run_in_executor(None, done.result().close)

    try:
        return wrap(await asyncio.shield(opening))
    except asyncio.CancelledError:
        opening.add_done_callback(close_unclaimed)
        raise


def _called_like(blocking: Callable[_P, object]) -> Callable[[Callable[..., _Result]], Callable[_P, _Result]]:
    """Give a function the parameters and the docstring of `blocking`, for readers and for type checkers."""

    def decorated(function: Callable[..., _Result]) -> Callable[_P, _Result]:
        # `wraps` also replaces the short docstring below by the complete one of the blocking function.
        @wraps(blocking)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
            return function(*args, **kwargs)

        return call

    return decorated


@_called_like(open_database)
def open(*args: Any, **kwargs: Any) -> Opening[AsyncDb]:  # noqa: A001 - the name users expect
    """A database open for writing; takes the arguments of `flagstone.open`. Await it, or use `async with`."""
    return Opening(partial(open_database, *args, **kwargs), AsyncDb)


@_called_like(_open_reader)
def open_reader(*args: Any, **kwargs: Any) -> Opening[AsyncDbReader]:
    """A reader; takes the arguments of `flagstone.open_reader`. Await it, or use `async with`."""
    return Opening(partial(_open_reader, *args, **kwargs), AsyncDbReader)


@_called_like(_open_feed)
def open_feed(*args: Any, **kwargs: Any) -> Opening[AsyncChangeFeed]:
    """A change feed; takes the arguments of `flagstone.open_feed`. Await it, or use `async with`."""
    return Opening(partial(_open_feed, *args, **kwargs), AsyncChangeFeed)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        from flagstone.config.fields import suggestion  # noqa: PLC0415 - only for the error

        near = "" if name.startswith("_") else suggestion(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")
