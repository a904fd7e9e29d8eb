"""A plain reader of a whole database: every reachable row, merged in memory. The model of the golden tests."""

from __future__ import annotations

from collections.abc import Iterator

from flagstone.format.sst import FOOTER_BYTES, decode_sst
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing
from flagstone.types import MERGE, TOMBSTONE, EntryTuple, WalId
from golden.corpus import GoldenDatabase


class PlainReader:
    """Reads one golden database at any of its manifests."""

    def __init__(self, database: GoldenDatabase) -> None:
        self.store = LocalStore(database.store)
        self.wal_store = LocalStore(database.wal_store) if database.wal_store else self.store
        self.paths = DbPaths(database.path)
        self.manifests = ManifestStore(self.store, self.paths)

    def contents(self, manifest_id: int | None = None) -> dict[bytes, bytes]:
        """What a scan returns: the latest state with the whole WAL, or one manifest with the WAL files it refers to."""
        latest = self.manifests.require_latest()
        manifest = latest.value if manifest_id is None else self.manifests.load(manifest_id)
        last_wal = None if manifest_id is None or manifest_id == latest.id else manifest.wal_id_last_seen
        versions: dict[bytes, dict[int, EntryTuple]] = {}
        for row in (*self._table_rows(manifest), *self._wal_rows(manifest, last_wal)):
            versions.setdefault(row[0], {})[row[1]] = row
        visible = ((key, _visible(rows)) for key, rows in versions.items())
        return {key: value for key, value in visible if value is not None}

    def _table_rows(self, manifest: Manifest) -> Iterator[EntryTuple]:
        for view in manifest.views:
            sst = manifest.sst(view)
            owner = manifest.path_of_owner(sst.id)
            path = (self.paths if owner is None else DbPaths(owner)).sst(sst.id)
            visible = view.effective_range(sst.info)
            for block in decode_sst(self.store.get(path).data, path).rows():
                yield from (row for row in block if row[0] in visible)

    def _wal_rows(self, manifest: Manifest, last: int | None) -> Iterator[EntryTuple]:
        wal_id = manifest.replay_after_wal_id + 1
        while last is None or wal_id <= last:
            path = self.paths.wal(WalId(wal_id))
            try:
                data = self.wal_store.get(path).data
            except ObjectMissing:
                return
            if len(data) > FOOTER_BYTES:
                for block in decode_sst(data, path).rows():
                    yield from (row for row in block if row[1] > manifest.last_l0_seq)
            wal_id += 1


def _visible(rows: dict[int, EntryTuple]) -> bytes | None:
    """The newest value with the operands above it concatenated, as the corpus's merge operator does."""
    operands: list[bytes] = []
    base: bytes | None = None
    for seq in sorted(rows, reverse=True):
        _, _, kind, value, _, _ = rows[seq]
        if kind != MERGE:
            base = None if kind == TOMBSTONE else value
            break
        operands.append(value)
    return (base or b"") + b"".join(reversed(operands)) if operands else base
