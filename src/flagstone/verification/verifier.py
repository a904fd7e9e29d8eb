"""Walks a database, Flagstone's or SlateDB's, and checks that everything it refers to exists and is sound.

The walk goes from the latest manifest and the manifests that its checkpoints name to every SST and WAL file they refer
to, and then over all remaining objects in the database's folders. It reads only, and may run beside a writer. If it
finds damage and the database has a newer manifest by then, the walk is repeated.

Manifests are read first; together with the listings they give the SSTs and WAL files to check. A `Checker` reads and
checks each of those on its own (`ssts`). Then the references to them are checked (`references`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from flagstone.errors import CorruptData, FlagstoneError, InternalError, InvalidRequest
from flagstone.format.sst_info import SstType
from flagstone.metadata.annotations import RETENTION_MANIFEST_ID
from flagstone.metadata.borrowing import Owner, owner_of
from flagstone.metadata.boundary import decode_boundary
from flagstone.metadata.compactions import Compactions, check_compactions, load_compactions
from flagstone.metadata.invariants import check_repaired_state, check_stored
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import load_manifest
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import BoundaryOf, DbPaths
from flagstone.store.port import ObjectMeta, ObjectMissing, ObjectStore
from flagstone.types import CompactionsId, ManifestId
from flagstone.verification.references import judge_ssts, judge_wal, sst_paths
from flagstone.verification.report import SEVERITIES, Report, Severity
from flagstone.verification.ssts import Checker, LocalChecker, SstCheck, Subject

_ATTEMPTS: Final = 3
_BATCH: Final = 8
"""How many manifests are fetched at once: enough to hide latency, few enough for memory."""


class Verifier:
    """Verifies one database; every call of `verify()` reads everything again."""

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        wal_store: ObjectStore | None = None,
        checker: Checker | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._wal_store = wal_store or store
        self._paths = paths
        self._checker = checker or LocalChecker(store, self._wal_store)
        self._clock = clock
        self._report = Report("")

    def verify(self) -> Report:
        """Read and check everything.

        Raises `InvalidRequest` if there is no database, `Unavailable` if the store does not answer.
        """
        started = self._clock.monotonic()
        for attempt in range(_ATTEMPTS):
            report = self._walk()
            if report.ok or self._newest_manifest() == report.manifest_id:
                break
            # A writer or compactor is active: missing objects may have been replaced and deleted during the walk.
            if attempt + 1 == _ATTEMPTS:
                self._drop_released(report)
        report.seconds = self._clock.monotonic() - started
        return report

    def _walk(self) -> Report:
        self._report = Report(f"{self._store.url} {self._paths.root}".strip())
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
        reached = {} if latest is None else dict(self._reachable(latest_id, latest, manifests))
        wal = self._list_wal()
        ssts = self._plan_ssts(reached.values())
        orphans = self._list_orphans(ssts)
        subjects = [*wal.values(), *ssts.values(), *orphans.values()]
        checks = dict(zip([each.path for each in subjects], self._checker.check(subjects), strict=True))
        self._report_wal(latest, manifests, {wal_id: checks[each.path] for wal_id, each in wal.items()})
        self._report_ssts(ssts, checks)
        for manifest_id, manifest in reached.items():
            judge_ssts(self._report, manifest, self._paths.manifest(manifest_id), self._paths, checks)
        if latest is not None:
            self._check_lenders(latest)
        self._report_orphans(orphans, checks)
        self._report.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        return self._report

    def _drop_released(self, report: Report) -> None:
        """Drop damage of SSTs and manifests that the newest state does not refer to: they were released meanwhile."""
        self._report = Report(report.database)
        manifests = self._read_manifests()
        latest_id = max(manifests, default=None)
        latest = None if latest_id is None else manifests[latest_id]
        if latest_id is None or latest is None:
            return
        reached = dict(self._reachable(latest_id, latest, manifests))
        needed = {self._paths.manifest(manifest_id) for manifest_id in reached}
        for manifest in reached.values():
            needed.update(sst_paths(manifest, self._paths).values())
        # Checkpoints whose manifest is missing.
        needed.update(finding.object for finding in self._report.damage)
        own = (f"{self._paths.sst_folder}/", f"{self._paths.manifest_folder}/")
        report.findings = [
            finding
            for finding in report.findings
            if finding.severity != "damage" or finding.object in needed or not finding.object.startswith(own)
        ]

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
                found[manifest_id] = load_manifest(data, meta.path)
            except CorruptData as error:
                self._report.add_error(error, meta.path)
                found[manifest_id] = None
        for manifest_id, manifest in found.items():
            # The manifest of retention checkpoints is no part of the history: manifest 1 does not follow it.
            before = (
                found.get(ManifestId(manifest_id - 1)) if manifest_id - 1 != RETENTION_MANIFEST_ID else None
            )
            if manifest is not None:
                try:
                    check_stored(manifest, before)
                except InternalError as error:
                    severity = _severity_of_step(manifest, before)
                    self._report_step(severity, "manifest", manifest_id, error)
        return found

    def _report_step(self, severity: Severity, of: BoundaryOf, at: int, error: InternalError) -> None:
        """Report an object that cannot follow the one before it.

        A late request of a fenced process may create an object again that garbage collection has deleted. Its id is
        not above the boundary, so no process takes it for the latest, and garbage collection deletes it again.
        """
        path = (
            self._paths.manifest(ManifestId(at))
            if of == "manifest"
            else self._paths.compactions(CompactionsId(at))
        )
        if at - 1 <= self._read_boundary(of):
            self._report.add("note", path, f"a late request has created it or the one before it: {error}")
        else:
            self._report.add(severity, path, str(error))

    def _read_boundary(self, of: BoundaryOf) -> int:
        """The boundary, 0 without one; `_check_boundary` reports a damaged one."""
        path = self._paths.boundary(of)
        with suppress(ObjectMissing, CorruptData):
            return decode_boundary(self._store.get(path).data, path)
        return 0

    def _read_compactions(self) -> int | None:
        """Check all compactions files; returns the highest id."""
        highest: int | None = None
        before: Compactions | None = None
        for meta, data in self._fetch_folder(self._store, self._paths.compactions_folder):
            compactions_id = self._paths.parse_compactions(meta.path)
            if compactions_id is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
                continue
            self._report.count("compactions", len(data))
            former, before = before if highest == compactions_id - 1 else None, None
            highest = compactions_id
            try:
                before = load_compactions(data, meta.path)
                check_compactions(before, former)
            except CorruptData as error:
                self._report.add_error(error, meta.path)
            except InternalError as error:
                self._report_step("damage", "compactions", compactions_id, error)
        return highest

    def _check_boundary(self, of: str, newest: int | None) -> None:
        path = self._paths.boundary("manifest" if of == "manifest" else "compactions")
        try:
            data = self._store.get(path).data
        except ObjectMissing:
            return
        self._report.count("boundary", len(data))
        try:
            boundary = decode_boundary(data, path)
        except CorruptData as error:
            self._report.add_error(error, path)
            return
        if boundary >= (newest or 0):
            self._report.add("damage", path, f"boundary {boundary} is not below the newest {of} {newest}", 0)

    def _reachable(
        self, latest_id: ManifestId, latest: Manifest, manifests: dict[ManifestId, Manifest | None]
    ) -> Iterator[tuple[ManifestId, Manifest]]:
        """The latest manifest, and those its checkpoints name."""
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
            manifest = manifests[checkpoint.manifest_id]
            if checkpoint.manifest_id not in seen and manifest is not None:
                seen.add(checkpoint.manifest_id)
                yield checkpoint.manifest_id, manifest

    def _check_lenders(self, latest: Manifest) -> None:
        """A lender must hold this clone's final checkpoint, or its garbage collection may delete the lent SSTs."""
        for lender in latest.external_dbs:
            paths = DbPaths(lender.path)
            try:
                newest = max(
                    (
                        meta.path
                        for meta in self._store.list(paths.manifest_folder)
                        if paths.parse_manifest(meta.path)
                    ),
                    default=None,
                )
                held = load_manifest(self._store.get(newest).data, newest) if newest else None
            except CorruptData as error:
                self._report.add_error(error, paths.manifest_folder, "warning")
                continue
            final = (
                None
                if held is None or lender.final_checkpoint_id is None
                else held.checkpoint(lender.final_checkpoint_id)
            )
            if lender.sst_ids and owner_of(final, self._paths.root) is Owner.OTHER:
                assert final is not None, "it has a name"
                self._report.add(
                    "warning",
                    paths.manifest_folder,
                    f"{lender.path} lends {len(lender.sst_ids)} SSTs by the checkpoint {final.id}, which is kept for "
                    f"another database ({final.name}) and is deleted with it: this one was copied or moved; a clone of "
                    "it has checkpoints of its own",
                )
            if lender.sst_ids and final is None:
                self._report.add(
                    "warning",
                    paths.manifest_folder,
                    f"{lender.path} lends {len(lender.sst_ids)} SSTs but lacks checkpoint "
                    f"{lender.final_checkpoint_id}; its garbage collection may delete them",
                )

    # -- SSTs and WAL -------------------------------------------------------------------------------------

    def _list_wal(self) -> dict[int, Subject]:
        """The WAL files by id, ascending."""
        found: dict[int, Subject] = {}
        for meta in self._wal_store.list(self._paths.wal_folder):
            wal_id = self._paths.parse_wal(meta.path)
            if wal_id is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
            else:
                found[wal_id] = Subject(meta.path, SstType.WAL, meta.size)
        return found

    def _plan_ssts(self, manifests: Iterable[Manifest]) -> dict[str, Subject]:
        """The SSTs that the manifests refer to, by path, each once."""
        planned: dict[str, Subject] = {}
        for manifest in manifests:
            for sst_id, path in sst_paths(manifest, self._paths).items():
                size = manifest.ssts[sst_id].info.estimated_size
                planned.setdefault(path, Subject(path, SstType.COMPACTED, size))
        return planned

    def _list_orphans(self, referenced: Mapping[str, Subject]) -> dict[str, Subject]:
        """SSTs that no manifest refers to: uploads under way, leftovers of crashes, or old sources of compactions."""
        found: dict[str, Subject] = {}
        for meta in self._store.list(self._paths.sst_folder):
            if self._paths.parse_sst(meta.path) is None:
                self._report.add("note", meta.path, "not an object of this database; left alone")
            elif meta.path not in referenced:
                found[meta.path] = Subject(meta.path, SstType.COMPACTED, meta.size)
        return found

    def _report_wal(
        self,
        latest: Manifest | None,
        manifests: Mapping[ManifestId, Manifest | None],
        checks: Mapping[int, SstCheck | None],
    ) -> None:
        # Deleted between listing and reading: it was not needed any more.
        present = {wal_id: check for wal_id, check in checks.items() if check is not None}
        for check in present.values():
            self._note("wal fence" if check.is_fence else "wal", check)
        if latest is not None:
            now_s = self._clock.now_ms() // 1000
            judge_wal(
                self._report,
                latest,
                manifests,
                present,
                paths=self._paths,
                now_s=now_s,
                reread=lambda: self._reread(latest),
            )

    def _reread(self, known: Manifest) -> Manifest:
        """The newest manifest; `known` if it cannot be read now, which the walk reports elsewhere."""
        newest = self._newest_manifest()
        with suppress(CorruptData, ObjectMissing):
            if newest is not None:
                path = self._paths.manifest(ManifestId(newest))
                return load_manifest(self._store.get(path).data, path)
        return known

    def _report_ssts(self, paths: Iterable[str], checks: Mapping[str, SstCheck | None]) -> None:
        for path in paths:
            check = checks[path]
            if check is not None:
                self._note("sst", check)

    def _report_orphans(self, orphans: Mapping[str, Subject], checks: Mapping[str, SstCheck | None]) -> None:
        before = len(self._report.findings)
        self._report_ssts(orphans, checks)
        # Damage in an SST that no process reads does no harm.
        self._report.findings[before:] = [
            type(finding)("warning", finding.object, finding.problem, finding.offset)
            for finding in self._report.findings[before:]
        ]
        if orphans:
            self._report.add(
                "note",
                self._paths.sst_folder,
                f"{len(orphans)} SSTs that no current manifest or checkpoint refers to",
            )

    def _note(self, kind: str, check: SstCheck) -> None:
        self._report.count(kind, check.size)
        self._report.rows += check.rows
        self._report.findings.extend(check.problems)

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
                # Deleted between listing and reading: it was not needed any more.
                if data is not None:
                    yield meta, data


def _severity_of_step(manifest: Manifest, before: Manifest | None) -> Severity:
    """A warning for a restored or repaired state, or repeated view ids (SlateDB's unions): they lose no data."""
    try:
        check_repaired_state(manifest, before or manifest)
    except FlagstoneError:
        return "damage"
    return "warning"
