"""`AsyncDbReader`: the face of a reader for an event loop."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from flagstone.db.async_reading import AsyncReads
from flagstone.db.reader import DbReader
from flagstone.metadata.manifest import Manifest


class AsyncDbReader(AsyncReads):
    """A database open for reading only, for any number of tasks; see `DbReader`. Close it, or use `async with`."""

    def __init__(self, reader: DbReader) -> None:
        self._reads: DbReader = reader

    async def refresh(self) -> None:
        """Show what is on the store now, without waiting for the next poll. See `DbReader.refresh`."""
        await asyncio.to_thread(self._reads.refresh)

    async def status(self) -> dict[str, Any]:
        """What an operator wants to know, as plain values."""
        return self._reads.status()

    async def metrics(self) -> dict[str, Any]:
        """All metrics under SlateDB's names."""
        return self._reads.metrics()

    async def manifest(self) -> Manifest:
        """The manifest that is shown."""
        return self._reads.manifest()

    @property
    def closed(self) -> bool:
        """Whether it was closed; every call then raises `Closed`."""
        return self._reads.closed

    async def close(self) -> None:
        """Stop following and delete the checkpoint this reader holds. Closing twice is fine."""
        await asyncio.to_thread(self._reads.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self._reads!r}"
