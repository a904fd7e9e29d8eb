"""Planted bugs: mistakes that the simulation must find.

Each mutant replaces one method of the product by a wrong one while it is installed. `FOUND_BY` names a world that finds
it, so that a test can show it in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from flagstone.kernels import memtable as kernel
from flagstone.types import MAX_SEQ


class Mutant(NamedTuple):
    """A wrong method: where it is, what it does instead, and which mistake it stands for."""

    target: str
    make: Callable[[Any], Any]
    mistake: str


def _skip(*_arguments: Any, **_options: Any) -> None:
    return None


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with that bug."""
    mutant = MUTANTS[name]
    owner, _, attribute = mutant.target.rpartition(".")
    with patch(mutant.target, mutant.make(_resolve(owner, attribute))):
        yield


def _resolve(owner: str, attribute: str) -> Any:
    from pkgutil import resolve_name  # noqa: PLC0415

    return getattr(resolve_name(owner), attribute)


def _acknowledge_before_upload(_right: Callable[[Any], None]) -> Callable[[Any], None]:
    def write_file(self: Any) -> None:
        source = self._source
        seal, noted = source.seal_wal, source.note_logged
        spans, last_seq = seal()
        if spans:
            noted(self._next_id, last_seq)
            self._put(self._paths.wal(self._next_id), self._encode(spans))
            self._next_id += 1

    return write_file


def _rows_above_by_insert(memtable: Any, seq: int) -> Any:
    kept: Any = kernel.Memtable()
    cursor = memtable.scan(None, None, MAX_SEQ, False)
    while rows := cursor.next_rows(4096):
        for row in rows:
            for version in reversed(memtable.versions(row[0], MAX_SEQ)):
                if version[1] > seq:
                    kept.insert(*version)
    return kept


MUTANTS: Final[dict[str, Mutant]] = {
    "acknowledge_before_upload": Mutant(
        "flagstone.wal.writer.WalWriter.write_file",
        _acknowledge_before_upload,
        "the WAL writer reports rows as durable before their file is on the store",
    ),
    "skip_ownership": Mutant(
        "flagstone.wal.writer.Ownership.ensure",
        lambda _: _skip,
        "a writer does not read the manifest after it created a WAL file",
    ),
    "skip_boundary": Mutant(
        "flagstone.metadata.boundary.Boundary.admits",
        lambda _: lambda *_arguments: True,
        "a writer does not read the boundary after it created a manifest",
    ),
    "skip_fence_check": Mutant(
        "flagstone.metadata.fencing.Fence.check",
        lambda _: _skip,
        "a fenced process commits manifests",
    ),
    "reader_trims_by_insert": Mutant(
        "flagstone.db.reader.follower._rows_above",
        lambda _: _rows_above_by_insert,
        "a reader copies the rest of a memtable in key order with a method for ascending sequence numbers",
    ),
}
