"""Checks that everything manifests refer to exists and matches them. Pure: it compares what was read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from flagstone.lsm.tree import SstView
from flagstone.metadata.annotations import RETENTION_MANIFEST_ID, decode_retention
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.parallel_wal import allowed_hole
from flagstone.runtime.ids import ulid_text
from flagstone.store.paths import DbPaths
from flagstone.types import ManifestId, Ulid, WalId
from flagstone.verification.report import Report
from flagstone.verification.ssts import SstCheck
from flagstone.wal.frontier import FIRST_FENCE, is_loss


def sst_paths(manifest: Manifest, own: DbPaths) -> dict[Ulid, str]:
    """The paths of the SSTs of a manifest: in the database's own folder, or in the lender's."""
    owners = {sst_id: DbPaths(db.path) for db in manifest.external_dbs for sst_id in db.sst_ids}
    return {sst_id: owners.get(sst_id, own).sst(sst_id) for sst_id in manifest.ssts}


def judge_ssts(
    report: Report, manifest: Manifest, source: str, own: DbPaths, checks: Mapping[str, SstCheck | None]
) -> None:
    """Every SST of the manifest at `source` exists and matches it, and is in the right segment and order."""
    where = sst_paths(manifest, own)
    for sst_id, sst in manifest.ssts.items():
        check = checks[where[sst_id]]
        if check is None:
            report.add("damage", where[sst_id], f"missing, but {source} refers to it")
        elif check.info is not None:
            _compare_with_manifest(report, check, sst, manifest, source)
    trees = [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]
    for prefix, tree in trees:
        for view in tree.views:
            _judge_view(report, view, manifest.sst(view), prefix, source)
        for run in tree.runs:
            _judge_run(report, run.views, manifest, f"run {run.id}", source)


def _compare_with_manifest(
    report: Report, check: SstCheck, sst: SsTable, manifest: Manifest, source: str
) -> None:
    if check.info != sst.info:
        report.add("damage", check.path, f"SsTableInfo differs from the one in {source}")
    if check.version != sst.format_version:
        report.add(
            "damage", check.path, f"format version {check.version}, but {sst.format_version} in {source}"
        )
    if check.max_seq is not None and check.max_seq > manifest.last_l0_seq:
        report.add(
            "warning",
            check.path,
            f"holds sequence number {check.max_seq}, above last_l0_seq {manifest.last_l0_seq} of {source}",
        )


def _judge_view(report: Report, view: SstView, sst: SsTable, prefix: bytes, source: str) -> None:
    visible = view.effective_range(sst.info)
    if visible.empty:
        report.add("damage", source, f"a view of {ulid_text(sst.id)} shows none of its keys")
    for key in (sst.info.first_entry, sst.info.last_entry):
        if key is not None and key in visible and not key.startswith(prefix):
            report.add("damage", source, f"segment {prefix!r} holds the key {key!r} of another segment")


def _judge_run(
    report: Report, views: tuple[SstView, ...], manifest: Manifest, name: str, source: str
) -> None:
    """Views of a run ascend, and neighbours share one key at most."""
    ranges = [view.effective_range(manifest.sst(view).info) for view in views]
    for one, following in pairwise(ranges):
        # Neighbours may share one key: then the first stops right after it, at the key with a zero byte appended.
        if one.stop is None or following.start is None or one.stop > following.start + b"\0":
            report.add("damage", source, f"{name}: its SSTs overlap or are out of order")


def judge_wal(
    report: Report,
    latest: Manifest,
    manifests: Mapping[ManifestId, Manifest | None],
    present: Mapping[int, SstCheck],
    *,
    paths: DbPaths,
    now_s: int,
    reread: Callable[[], Manifest],
) -> None:
    """No WAL file that replay, a checkpoint or a consumer needs is missing, and sequence numbers ascend.

    `reread` reads a manifest that is newer than the files: in a busy database `latest` is older than some of them.
    """
    ids = sorted(present)
    _judge_continuity(report, latest, ids, paths)
    _judge_checkpoints(report, latest, manifests, ids, paths=paths, now_s=now_s)
    files = [check for _, check in sorted(present.items()) if check.max_seq is not None]
    for one, following in pairwise(files):
        if following.min_seq is not None and one.max_seq is not None and following.min_seq <= one.max_seq:
            report.add(
                "damage",
                following.path,
                f"begins at sequence number {following.min_seq}, but {one.path} ends at {one.max_seq}",
            )
    suspected = Report(report.database)
    _judge_empty_files(suspected, latest, present, paths)
    if suspected.findings:
        _judge_empty_files(report, reread(), present, paths)


def _judge_empty_files(
    report: Report, latest: Manifest, files: Mapping[int, SstCheck], paths: DbPaths
) -> None:
    """An empty file is a fence, unless sequence numbers are missing around it and there are more such files than
    writers.
    """
    empty_files = sum(1 for check in files.values() if not check.size)
    seen_seq, suspects, before = 0, list[SstCheck](), 0
    for wal_id, check in sorted(files.items()):
        if wal_id != before + 1:
            suspects = []  # the files that are missing here, which are judged elsewhere, have these sequence numbers
        before = wal_id
        if not check.size and check.path != paths.wal(FIRST_FENCE):
            suspects.append(check)
        if check.min_seq is None or check.max_seq is None:
            continue
        # Flushed rows are in SSTs, whatever the WAL holds.
        seen_seq = max(seen_seq, int(latest.last_l0_seq))
        step = check.min_seq > seen_seq + 1
        if suspects and step and is_loss(empty_files=empty_files, writers=latest.writer_epoch):
            report.add(
                "damage",
                suspects[-1].path,
                f"empty, and sequence numbers {seen_seq + 1} to {check.min_seq - 1} are missing around it",
                0,
            )
        seen_seq, suspects = max(seen_seq, check.max_seq), []
    if empty_files > latest.writer_epoch:
        report.add(
            "warning",
            paths.wal_folder,
            f"{empty_files} files are empty, but only {latest.writer_epoch} writers made a fence: one may have lost "
            "its rows",
        )


def _judge_continuity(report: Report, latest: Manifest, present: list[int], paths: DbPaths) -> None:
    """WAL ids after `replay_after_wal_id` are contiguous: replay would stop at a hole."""
    first = latest.replay_after_wal_id + 1
    needed = present[bisect_left(present, first) :]
    last = max([*needed[-1:], latest.wal_id_last_seen])
    for start, stop in missing_runs(needed, first, last + 1):
        if latest.wal_id_last_seen < start and last <= start + allowed_hole(latest):
            report.add(
                "warning",
                paths.wal(WalId(start)),
                "missing: a writer with several WAL files under way is creating it, or has crashed; the next opening "
                "by Flagstone, or a repair, drops the files after it",
            )
            return
        hidden = len(needed) - bisect_left(needed, stop)
        count = "" if stop - start == 1 else f" like {stop - start - 1} more, up to file {stop - 1}"
        report.add(
            "damage",
            paths.wal(WalId(start)),
            f"missing{count}; replay stops here, {hidden} files before the end",
        )


def missing_runs(present: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ids from `start` up to `stop` that are not present, as half-open ranges. Pure.

    `present` ascends. The work grows with `present`, not with the range, which may be huge in a damaged manifest.
    """
    at = start
    for known in present[bisect_left(present, start) : bisect_left(present, stop)]:
        if known > at:
            yield at, known
        at = known + 1
    if at < stop:
        yield at, stop


def _judge_checkpoints(
    report: Report,
    latest: Manifest,
    manifests: Mapping[ManifestId, Manifest | None],
    present: Sequence[int],
    *,
    paths: DbPaths,
    now_s: int,
) -> None:
    """A checkpoint keeps the WAL from its manifest's `replay_after_wal_id` to its `wal_id_last_seen`.

    A retention checkpoint keeps it from the consumer's position to the end.
    """
    for checkpoint in latest.checkpoints:
        manifest = manifests.get(checkpoint.manifest_id)
        if manifest is None or (checkpoint.expires_s is not None and checkpoint.expires_s <= now_s):
            continue
        consumer = decode_retention(checkpoint)
        if consumer is None and checkpoint.manifest_id == RETENTION_MANIFEST_ID:
            continue  # the record of a range delete, which needs no WAL file
        if consumer is None:
            first, stop = manifest.replay_after_wal_id + 1, manifest.wal_id_last_seen + 1
        else:
            first, stop = consumer.position.next_id, max(present, default=0) + 1
        for start, end in missing_runs(present, first, stop):
            count = "" if end - start == 1 else f" like {end - start - 1} more, up to file {end - 1}"
            report.add(
                "damage",
                paths.wal(WalId(start)),
                f"missing{count}, but checkpoint {checkpoint.id} needs it",
            )
