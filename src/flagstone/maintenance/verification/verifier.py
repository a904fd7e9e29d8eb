"""Walks a database, SlateDB's or ours, and checks that everything it refers to is there and sound.

The walk goes from the latest manifest and the manifests its checkpoints pin to every SST and WAL file they
reach, and then over all remaining objects in the database's folders. It reads only; a writer may be at work
meanwhile. When damage shows and the database has moved on under the walk, the walk is taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from flagstone.errors import CorruptData, InternalError, InvalidRequest
from flagstone.format.sst_info import SstType
from flagstone.lsm.tree import SstView
from flagstone.maintenance.verification.report import SEVERITIES, Report, Severity
from flagstone.maintenance.verification.tables import TableCheck, check_table
from flagstone.metadata.compactions_codec import decode_compactions
from flagstone.metadata.invariants import check_compactions, check_manifest, check_replaced_state
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.manifest_codec import decode_manifest
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import ulid_text
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMeta, ObjectMissing, ObjectStore
from flagstone.types import ManifestId, WalId
from flagstone.wal.pins import PIN_MANIFEST_ID, decode_pin

_ATTEMPTS: Final = 3
_BATCH: Final = 8
"""How many objects are fetched at once: enough to hide latency, few enough for memory."""


class Verifier:
    """Verifies one database; every call of `verify()` starts afresh."""

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        wal_store: ObjectStore | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._wal_store = wal_store or store
        self._paths = paths
        self._clock = clock
        self._report = Report("")
        self._tables: dict[str, TableCheck | None] = {}

    def verify(self) -> Report:
        """Read everything.

        Raises `InvalidRequest` when there is no database, `Unavailable` when the store does not answer.
        """
        for _ in range(_ATTEMPTS - 1):
            report = self._walk()
            if report.ok or self._newest_manifest() == report.manifest_id:
                return report
            # Somebody is at work: what the walk missed may have been replaced and collected under it.
        return self._walk()

    def _walk(self) -> Report:
        self._report = Report(f"{self._store.url} {self._paths.root}".strip())
        self._tables = {}
        manifests = self._read_manifests()
        if not manifests:
            raise InvalidRequest(
                f"no database at {self._report.database}: there is no object in {self._paths.manifest_folder}/"
            )
        latest_id = max(manifests)
        self._report.manifest_id = latest_id
        self._check_boundary("manifest", latest_id)
        self._check_boundary("compactions", self._read_compactions())
        latest = manifests[latest_id]
        self._check_wal(latest, manifests)
        if latest is not None:
            for manifest_id, manifest in self._reachable(latest_id, latest, manifests):
                self._check_tables(manifest_id, manifest)
            self._check_parents(latest)
        self._check_rest()
        self._report.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        return self._report

    def _newest_manifest(self) -> int | None:
        ids = (
            self._paths.parse_manifest(meta.path) for meta in self._store.list(self._paths.manifest_folder)
        )
        return max((found for found in ids if found is not None), default=None)

    # -- metadata -----------------------------------------------------------------------------------------

    def _read_manifests(self) -> dict[ManifestId, Manifest | None]:
        """All manifests by id; None for one that cannot be decoded."""
        found: dict[ManifestId, Manifest | None] = {}
        for meta, data in self._fetch_folder(self._store, self._paths.manifest_folder):
            manifest_id = self._paths.parse_manifest(meta.path)
            if manifest_id is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
                continue
            self._report.count("manifest", len(data))
            try:
                found[manifest_id] = decode_manifest(data)
            except CorruptData as error:
                self._report.add_error(error.within(meta.path), meta.path)
                found[manifest_id] = None
        for manifest_id, manifest in found.items():
            # What pins the log is no part of the history, and so nothing the first manifest could follow.
            before = found.get(ManifestId(manifest_id - 1)) if manifest_id - 1 != PIN_MANIFEST_ID else None
            if manifest is not None:
                try:
                    check_manifest(manifest, before)
                except InternalError as error:
                    severity = _severity_of_step(manifest, before)
                    self._report.add(severity, self._paths.manifest(manifest_id), str(error))
        return found

    def _read_compactions(self) -> int | None:
        """Check all compactions files; returns the highest id."""
        highest = before = None
        for meta, data in self._fetch_folder(self._store, self._paths.compactions_folder):
            compactions_id = self._paths.parse_compactions(meta.path)
            if compactions_id is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
                continue
            self._report.count("compactions", len(data))
            try:
                compactions = decode_compactions(data)
                check_compactions(compactions, before if highest == compactions_id - 1 else None)
                before = compactions
            except CorruptData as error:
                self._report.add_error(error.within(meta.path), meta.path)
            except InternalError as error:
                self._report.add("damage", meta.path, str(error))
            highest = compactions_id
        return highest

    def _check_boundary(self, of: str, newest: int | None) -> None:
        path = self._paths.boundary("manifest" if of == "manifest" else "compactions")
        try:
            data = self._store.get(path).data
        except ObjectMissing:
            return
        self._report.count("boundary", len(data))
        text = data.strip()
        if not text.isdigit() or int(text) >= 2**64:
            self._report.add("damage", path, f"a boundary is a decimal number, this is {data[:40]!r}", 0)
        elif int(text) >= (newest or 0):
            self._report.add("damage", path, f"boundary {int(text)} is not below the newest {of} {newest}", 0)

    def _reachable(
        self, latest_id: ManifestId, latest: Manifest, manifests: dict[ManifestId, Manifest | None]
    ) -> Iterator[tuple[ManifestId, Manifest]]:
        """The latest manifest, and those its checkpoints pin."""
        yield latest_id, latest
        seen = {latest_id}
        now_s = self._clock.now_ms() // 1000
        for checkpoint in latest.checkpoints:
            path = self._paths.manifest(checkpoint.manifest_id)
            label = f"checkpoint {checkpoint.id}" + (f" ({checkpoint.name})" if checkpoint.name else "")
            expired = checkpoint.expires_s is not None and checkpoint.expires_s <= now_s
            if expired:
                self._report.add("note", path, f"{label} has expired; garbage collection will remove it")
            if checkpoint.manifest_id not in manifests:
                self._report.add(
                    "warning" if expired else "damage", path, f"missing, but {label} refers to this manifest"
                )
                continue
            pinned = manifests[checkpoint.manifest_id]
            if checkpoint.manifest_id not in seen and pinned is not None:
                seen.add(checkpoint.manifest_id)
                yield checkpoint.manifest_id, pinned

    # -- tables -------------------------------------------------------------------------------------------

    def _check_tables(self, manifest_id: ManifestId, manifest: Manifest) -> None:
        owners = {sst_id: DbPaths(db.path) for db in manifest.external_dbs for sst_id in db.sst_ids}
        where = {sst_id: owners.get(sst_id, self._paths).table(sst_id) for sst_id in manifest.ssts}
        self._read_tables(where.values())
        source = self._paths.manifest(manifest_id)
        for sst_id, table in manifest.ssts.items():
            check = self._tables[where[sst_id]]
            if check is None:
                self._report.add("damage", where[sst_id], f"missing, but {source} refers to it")
            elif check.image is not None:
                self._compare_with_manifest(check, table, manifest, source)
        trees = [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]
        for prefix, tree in trees:
            for view in tree.views:
                self._check_view(view, manifest.table(view), prefix, source)
            for run in tree.runs:
                self._check_run(run.views, manifest, f"run {run.id}", source)

    def _read_tables(self, paths: Iterable[str]) -> None:
        """Read the SSTs that were not read before; several at a time, counted once each."""
        todo = [path for path in dict.fromkeys(paths) if path not in self._tables]
        for start in range(0, len(todo), _BATCH):
            batch = todo[start : start + _BATCH]
            for path, data in zip(batch, shared_pool().map_ordered(self._get_or_none, batch), strict=True):
                if data is None:
                    self._tables[path] = None
                    continue
                check = check_table(data, path, SstType.COMPACTED)
                self._report.count("table", len(data))
                self._report.rows += check.rows
                self._report.findings.extend(check.problems)
                self._tables[path] = check

    def _get_or_none(self, path: str) -> bytes | None:
        try:
            return self._store.get(path).data
        except ObjectMissing:
            return None

    def _compare_with_manifest(
        self, check: TableCheck, table: SsTable, manifest: Manifest, source: str
    ) -> None:
        assert check.image is not None
        if check.image.info != table.info:
            self._report.add("damage", check.path, f"SsTableInfo differs from the one in {source}")
        if check.image.version != table.format_version:
            self._report.add(
                "damage",
                check.path,
                f"format version {check.image.version}, {source} says {table.format_version}",
            )
        if check.max_seq is not None and check.max_seq > manifest.last_l0_seq:
            self._report.add(
                "warning",
                check.path,
                f"holds seq {check.max_seq}, beyond last_l0_seq {manifest.last_l0_seq} of {source}",
            )

    def _check_view(self, view: SstView, table: SsTable, prefix: bytes, source: str) -> None:
        visible = view.effective_range(table.info)
        if visible.empty:
            self._report.add("damage", source, f"a view of {ulid_text(table.id)} shows none of its keys")
        for key in (table.info.first_entry, table.info.last_entry):
            if key is not None and key in visible and not key.startswith(prefix):
                self._report.add("damage", source, f"segment {prefix!r} holds the foreign key {key!r}")

    def _check_run(self, views: tuple[SstView, ...], manifest: Manifest, name: str, source: str) -> None:
        """Views of a run ascend and touch at most in one key."""
        ranges = [view.effective_range(manifest.table(view).info) for view in views]
        for one, following in pairwise(ranges):
            # Neighbours may share one key: then the first stops right behind it, at its zero-byte successor.
            if one.stop is None or following.start is None or one.stop > following.start + b"\0":
                self._report.add("damage", source, f"{name}: its tables overlap or are out of order")

    def _check_parents(self, latest: Manifest) -> None:
        """Databases we borrow from must hold our checkpoint, or their collector may delete what we need."""
        for parent in latest.external_dbs:
            paths = DbPaths(parent.path)
            try:
                newest = max(
                    (
                        meta.path
                        for meta in self._store.list(paths.manifest_folder)
                        if paths.parse_manifest(meta.path)
                    ),
                    default=None,
                )
                held = decode_manifest(self._store.get(newest).data) if newest else None
            except CorruptData as error:
                self._report.add_error(error, paths.manifest_folder, "warning")
                continue
            pinned = held is not None and any(c.id == parent.final_checkpoint_id for c in held.checkpoints)
            if parent.sst_ids and not pinned:
                self._report.add(
                    "warning",
                    paths.manifest_folder,
                    f"{parent.path} lends {len(parent.sst_ids)} tables but lacks checkpoint "
                    f"{parent.final_checkpoint_id}; its garbage collection may delete them",
                )

    # -- log ----------------------------------------------------------------------------------------------

    def _check_wal(self, latest: Manifest | None, manifests: dict[ManifestId, Manifest | None]) -> None:
        present: dict[int, TableCheck] = {}
        for meta, data in self._fetch_folder(self._wal_store, self._paths.wal_folder):
            wal_id = self._paths.parse_wal(meta.path)
            if wal_id is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
                continue
            check = present[wal_id] = check_table(data, meta.path, SstType.WAL)
            self._report.count(
                "wal fence" if check.image is None and not check.problems else "wal", len(data)
            )
            self._report.rows += check.rows
            self._report.findings.extend(check.problems)
        if latest is None:
            return
        self._check_continuity(latest, sorted(present))
        self._check_pinned_wal(latest, manifests, present.keys())
        files = [check for _, check in sorted(present.items()) if check.max_seq is not None]
        for one, following in pairwise(files):
            if following.min_seq is not None and one.max_seq is not None and following.min_seq <= one.max_seq:
                self._report.add(
                    "damage",
                    following.path,
                    f"begins at seq {following.min_seq}, but {one.path} ends at {one.max_seq}",
                )

    def _check_continuity(self, latest: Manifest, present: list[int]) -> None:
        """Ids above the replay point are contiguous: a hole would hide everything behind it from replay."""
        needed = [wal_id for wal_id in present if wal_id > latest.replay_after_wal_id]
        last = max([*needed, latest.wal_id_last_seen])
        missing = sorted(set(range(latest.replay_after_wal_id + 1, last + 1)) - set(needed))
        for wal_id in missing:
            hidden = sum(1 for other in needed if other > wal_id)
            self._report.add(
                "damage",
                self._paths.wal(WalId(wal_id)),
                f"missing; replay stops here, {hidden} files before the end",
            )

    def _check_pinned_wal(
        self, latest: Manifest, manifests: dict[ManifestId, Manifest | None], present: Iterable[int]
    ) -> None:
        """A checkpoint keeps the log from its manifest's replay point to the last file that manifest knew.

        The pin of a consumer keeps it from where the consumer stands to its end.
        """
        have = set(present)
        now_s = self._clock.now_ms() // 1000
        for checkpoint in latest.checkpoints:
            pinned = manifests.get(checkpoint.manifest_id)
            if pinned is None or (checkpoint.expires_s is not None and checkpoint.expires_s <= now_s):
                continue
            consumer = decode_pin(checkpoint)
            if consumer is None:
                wanted = range(pinned.replay_after_wal_id + 1, pinned.wal_id_last_seen + 1)
            else:
                wanted = range(consumer.position.next_id, max(have, default=0) + 1)
            for wal_id in sorted(set(wanted) - have):
                self._report.add(
                    "damage",
                    self._paths.wal(WalId(wal_id)),
                    f"missing, but checkpoint {checkpoint.id} needs it",
                )

    # -- the rest -----------------------------------------------------------------------------------------

    def _check_rest(self) -> None:
        """Tables nobody refers to: uploads under way, leftovers of crashes, or compactions' old inputs."""
        orphans: list[str] = []
        for meta in self._store.list(self._paths.table_folder):
            if self._paths.parse_table(meta.path) is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
            elif meta.path not in self._tables:
                orphans.append(meta.path)
        before = len(self._report.findings)
        self._read_tables(orphans)
        # Damage in a table that nobody reads harms nobody.
        self._report.findings[before:] = [
            type(finding)("warning", finding.object, finding.problem, finding.offset)
            for finding in self._report.findings[before:]
        ]
        if orphans:
            self._report.add(
                "note",
                self._paths.table_folder,
                f"{len(orphans)} tables that no current manifest or checkpoint refers to",
            )

    def _fetch_folder(self, store: ObjectStore, folder: str) -> Iterator[tuple[ObjectMeta, bytes]]:
        """All objects of a folder with their bytes, a few at a time."""

        def fetch(meta: ObjectMeta) -> bytes | None:
            try:
                return store.get(meta.path).data
            except ObjectMissing:
                return None

        listed = list(store.list(folder))
        for start in range(0, len(listed), _BATCH):
            batch = listed[start : start + _BATCH]
            for meta, data in zip(batch, shared_pool().map_ordered(fetch, batch), strict=True):
                # Collected between listing and reading: it was not needed any more.
                if data is not None:
                    yield meta, data


def _severity_of_step(manifest: Manifest, before: Manifest | None) -> Severity:
    """A state that was restored, or repeated view ids (SlateDB's unions have them), break rules but lose nothing."""
    try:
        check_replaced_state(manifest, before or manifest)
    except InternalError:
        return "damage"
    return "warning"
