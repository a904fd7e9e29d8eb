"""SSTs on their way to the store while they are built."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from flagstone.sst.builder import BuiltSst
from flagstone.store.paths import DbPaths
from flagstone.store.writing import Destination, ObjectWriter
from flagstone.types import Ulid


class SstOutput:
    """Uploads the SSTs of one builder, one after the other, each under an id of its own.

        with SstOutput(store, paths, new_id) as output:
            builder = SstBuilder(open_sink=output.open)
            builder.add_rows(rows)
            sst_id = output.commit(builder.finish())

    An SST is an object only after its commit. Until a manifest refers to it, it is garbage. Leaving the block discards
    an SST that was not committed; a crash leaves its parts, as `Upload` says.

    `committed` is called with each SST, and with its bytes if it was small enough for one request.
    """

    def __init__(
        self,
        destination: Destination,
        paths: DbPaths,
        new_id: Callable[[], Ulid],
        *,
        committed: Callable[[Ulid, BuiltSst, bytes | None], None] = lambda *_: None,
    ) -> None:
        self._destination = destination
        self._paths = paths
        self._new_id = new_id
        self._committed = committed
        self._open: tuple[Ulid, ObjectWriter] | None = None

    def open(self) -> ObjectWriter:
        """The sink of the next SST."""
        sst_id = self._new_id()
        writer = ObjectWriter(self._destination, self._paths.sst(sst_id))
        self._open = (sst_id, writer)
        return writer

    def commit(self, built: BuiltSst) -> Ulid:
        """Make the finished SST an object; returns its id. After `Unavailable` it must be built again."""
        assert self._open is not None, "a finished SST has a sink"
        sst_id, writer = self._open
        writer.commit()
        self._open = None
        self._committed(sst_id, built, writer.whole)
        return sst_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open[1].abort()
