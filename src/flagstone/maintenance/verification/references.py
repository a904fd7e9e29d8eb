"""Whether what manifests refer to is there, and is what they say. Pure: judges what was read of every object."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from flagstone.lsm.tree import SstView
from flagstone.maintenance.verification.report import Report
from flagstone.maintenance.verification.tables import TableCheck
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.runtime.ids import ulid_text
from flagstone.store.paths import DbPaths
from flagstone.types import ManifestId, Ulid, WalId
from flagstone.wal.continuity import FIRST_FENCE, is_loss
from flagstone.wal.pins import decode_pin


def table_paths(manifest: Manifest, own: DbPaths) -> dict[Ulid, str]:
    """Where the tables of a manifest are: in its own folder, or in that of the database that lends them."""
    owners = {sst_id: DbPaths(db.path) for db in manifest.external_dbs for sst_id in db.sst_ids}
    return {sst_id: owners.get(sst_id, own).table(sst_id) for sst_id in manifest.ssts}


def judge_tables(
    report: Report, manifest: Manifest, source: str, own: DbPaths, checks: Mapping[str, TableCheck | None]
) -> None:
    """Every table of the manifest at `source` is there and is what it says, and all are where they belong."""
    where = table_paths(manifest, own)
    for sst_id, table in manifest.ssts.items():
        check = checks[where[sst_id]]
        if check is None:
            report.add("damage", where[sst_id], f"missing, but {source} refers to it")
        elif check.info is not None:
            _compare_with_manifest(report, check, table, manifest, source)
    trees = [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]
    for prefix, tree in trees:
        for view in tree.views:
            _judge_view(report, view, manifest.table(view), prefix, source)
        for run in tree.runs:
            _judge_run(report, run.views, manifest, f"run {run.id}", source)


def _compare_with_manifest(
    report: Report, check: TableCheck, table: SsTable, manifest: Manifest, source: str
) -> None:
    if check.info != table.info:
        report.add("damage", check.path, f"SsTableInfo differs from the one in {source}")
    if check.version != table.format_version:
        report.add(
            "damage", check.path, f"format version {check.version}, {source} says {table.format_version}"
        )
    if check.max_seq is not None and check.max_seq > manifest.last_l0_seq:
        report.add(
            "warning",
            check.path,
            f"holds seq {check.max_seq}, beyond last_l0_seq {manifest.last_l0_seq} of {source}",
        )


def _judge_view(report: Report, view: SstView, table: SsTable, prefix: bytes, source: str) -> None:
    visible = view.effective_range(table.info)
    if visible.empty:
        report.add("damage", source, f"a view of {ulid_text(table.id)} shows none of its keys")
    for key in (table.info.first_entry, table.info.last_entry):
        if key is not None and key in visible and not key.startswith(prefix):
            report.add("damage", source, f"segment {prefix!r} holds the foreign key {key!r}")


def _judge_run(
    report: Report, views: tuple[SstView, ...], manifest: Manifest, name: str, source: str
) -> None:
    """Views of a run ascend and touch at most in one key."""
    ranges = [view.effective_range(manifest.table(view).info) for view in views]
    for one, following in pairwise(ranges):
        # Neighbours may share one key: then the first stops right behind it, at its zero-byte successor.
        if one.stop is None or following.start is None or one.stop > following.start + b"\0":
            report.add("damage", source, f"{name}: its tables overlap or are out of order")


def judge_log(
    report: Report,
    latest: Manifest,
    manifests: Mapping[ManifestId, Manifest | None],
    present: Mapping[int, TableCheck],
    *,
    paths: DbPaths,
    now_s: int,
) -> None:
    """Nothing that replay, a checkpoint or a consumer needs is missing, and sequence numbers ascend."""
    ids = sorted(present)
    _judge_continuity(report, latest, ids, paths)
    _judge_pinned(report, latest, manifests, ids, paths=paths, now_s=now_s)
    files = [check for _, check in sorted(present.items()) if check.max_seq is not None]
    for one, following in pairwise(files):
        if following.min_seq is not None and one.max_seq is not None and following.min_seq <= one.max_seq:
            report.add(
                "damage",
                following.path,
                f"begins at seq {following.min_seq}, but {one.path} ends at {one.max_seq}",
            )
    _judge_empty_files(report, latest, [check for _, check in sorted(present.items())], paths)


def _judge_empty_files(report: Report, latest: Manifest, files: list[TableCheck], paths: DbPaths) -> None:
    """An empty file is a fence, unless numbers are missing around it and there are more of them than writers."""
    empty_files = sum(1 for check in files if not check.size)
    seen_seq, suspects = 0, list[TableCheck]()
    for check in files:
        if not check.size and check.path != paths.wal(FIRST_FENCE):
            suspects.append(check)
        if check.min_seq is None or check.max_seq is None:
            continue
        # What is flushed is in tables, whatever the WAL says of it.
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
    """Ids above the replay point are contiguous: a hole would hide everything behind it from replay."""
    first = latest.replay_after_wal_id + 1
    needed = present[bisect_left(present, first) :]
    last = max([*needed[-1:], latest.wal_id_last_seen])
    for start, stop in missing_runs(needed, first, last + 1):
        hidden = len(needed) - bisect_left(needed, stop)
        count = "" if stop - start == 1 else f" like {stop - start - 1} more, up to file {stop - 1}"
        report.add(
            "damage",
            paths.wal(WalId(start)),
            f"missing{count}; replay stops here, {hidden} files before the end",
        )


def missing_runs(present: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ids from `start` up to `stop` that are not present, as half-open runs. Pure.

    `present` ascends. The work grows with what is present, not with the range: a damaged manifest may name any.
    """
    at = start
    for known in present[bisect_left(present, start) : bisect_left(present, stop)]:
        if known > at:
            yield at, known
        at = known + 1
    if at < stop:
        yield at, stop


def _judge_pinned(
    report: Report,
    latest: Manifest,
    manifests: Mapping[ManifestId, Manifest | None],
    present: Sequence[int],
    *,
    paths: DbPaths,
    now_s: int,
) -> None:
    """A checkpoint keeps the log from its manifest's replay point to the last file that manifest knew.

    The pin of a consumer keeps it from where the consumer stands to its end.
    """
    for checkpoint in latest.checkpoints:
        pinned = manifests.get(checkpoint.manifest_id)
        if pinned is None or (checkpoint.expires_s is not None and checkpoint.expires_s <= now_s):
            continue
        consumer = decode_pin(checkpoint)
        if consumer is None:
            first, stop = pinned.replay_after_wal_id + 1, pinned.wal_id_last_seen + 1
        else:
            first, stop = consumer.position.next_id, max(present, default=0) + 1
        for start, end in missing_runs(present, first, stop):
            count = "" if end - start == 1 else f" like {end - start - 1} more, up to file {end - 1}"
            report.add(
                "damage",
                paths.wal(WalId(start)),
                f"missing{count}, but checkpoint {checkpoint.id} needs it",
            )
