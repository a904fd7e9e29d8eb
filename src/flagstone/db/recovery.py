"""How a process becomes the writer: find or create the database, claim it, fence the WAL, replay the WAL.

The order of the steps is SlateDB's protocol. After a crash at any step the next opening starts over. At worst a crash
leaves an unused epoch and an empty WAL file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from flagstone.clones.checkpoint import require_initialized
from flagstone.clones.origin import Writable, destroyed_database, load_origin, refuse_destroyed
from flagstone.db.writer.environment import Environment
from flagstone.errors import Closed, InvalidRequest
from flagstone.loads.notice import Notice, save_notice
from flagstone.lsm.segments import SegmentExtractor, check_extractor
from flagstone.metadata.annotations import held_loads
from flagstone.metadata.fencing import Fence, claim_writer
from flagstone.metadata.manifest import Manifest, new_manifest
from flagstone.metadata.parallel_wal import allowed_hole, find_parallel_wal, note_settled
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import is_long
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import ManifestId, Seq, WalId
from flagstone.wal.frontier import WalDamaged, check_no_hole, find_frontier
from flagstone.wal.replay import ReplayedFile, WalTruncated, replay
from flagstone.wal.takeover import EndedWal, end_wal
from flagstone.write.key_check import KeyRanges, SegmentCheck, WritableRangeCheck
from flagstone.write.state import Memtables
from flagstone.write.writer_state import Recovered

_log = logging.getLogger("flagstone.wal")

_ATTEMPTS = 3
FIRST_MANIFEST: Final = 1


@dataclass(frozen=True, slots=True)
class Opened:
    """The claim to the database, its recovered state, and its writable range if it has one."""

    fence: Fence
    recovered: Recovered
    key_ranges: KeyRanges | None = None


def open_for_writing(env: Environment, manifests: ManifestStore, *, create: bool) -> Opened:
    """Claim the database and replay its WAL.

    Raises:
        InvalidRequest: there is no database and `create` is False, the segment extractor is not the one it
            was created with, it was destroyed, or it is a clone that is not finished.
        Closed: another writer claimed it at the same time, and owns it now.
        CorruptData: a manifest or a WAL file is damaged, or a WAL file is missing.

    """
    current, writable = find_or_create(
        env.store, env.paths, manifests, create=create, extractor=env.extractor, pool=env.pool
    )
    check_extractor(
        env.extractor,
        stored_name=current.value.segment_extractor_name,
        prefixes=(segment.prefix for segment in current.value.segments),
    )
    # Before the claim: the former writer may add files until the fence exists.
    frontier = _find_frontier(env, current.value)
    # Before the first claim there is no WAL, so it has no hole.
    no_hole = (
        None
        if current.id == FIRST_MANIFEST
        else env.pool.submit(  # concurrent with the claim
            check_no_hole, env.wal_store, env.paths, frontier, allowed=allowed_hole(current.value)
        )
    )
    try:
        fence, claimed = claim_writer(manifests, parallel_wal=env.settings.max_parallel_wal_writes)
    except Closed:
        # Destroyed since the manifest was read: the manifest records it, so no claim succeeds.
        raise destroyed_database(env.store, env.paths) from None
    try:
        if no_hole is not None:
            no_hole.result()
    except WalDamaged:
        frontier = _find_end(env, manifests)

    def refresh() -> Manifest:
        latest = manifests.require_latest()
        fence.check(latest.value)
        return latest.value

    if claimed.value.writer_epoch > 1:
        _log.info(
            "took over path=%s epoch=%d former_epoch=%d",
            env.paths.root,
            fence.epoch,
            current.value.writer_epoch,
        )
    # Drivers of loads give this writer the time to replay the WAL, and do not open the database themselves.
    announced = (
        env.pool.submit(save_notice, env.store, env.paths, Notice(fence.epoch))
        if any(held.record.open for held in held_loads(claimed.value))
        else None
    )
    ended = end_wal(
        env.wal_store, env.paths, WalId(frontier + 1), claimed.value, refresh=refresh, pool=env.pool
    )
    if announced is not None and (unannounced := announced.exception()) is not None:
        _log.warning("cannot announce this writer to bulk loads error=%s", unannounced)
    limit = env.settings.max_parallel_wal_writes
    if limit > 1:
        _log.warning(
            "opened with max_parallel_wal_writes=%d path=%s: after a crash, open it with Flagstone or run `flagstone "
            "repair` before SlateDB opens it",
            limit,
            env.paths.root,
        )
    if find_parallel_wal(claimed.value) is not None:
        # Before the first file of this writer: from here on the next owner relies on these fences.
        manifests.update(fence.guard(partial(_note_settled, env, ended)))
    for attempt in range(_ATTEMPTS):
        # Read again: the former writer may have flushed a memtable between the claim and the fence. After a failed
        # replay `poll` is not enough: it misses a manifest that was deleted soon after it was written, as the
        # destruction of a database does.
        latest = manifests.poll() if attempt == 0 else manifests.require_latest()
        fence.check(latest.value)
        try:
            opened = _replayed(env, fence, latest, ended)
        except (WalTruncated, WalDamaged):
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            if writable is None:
                return opened
            # After the replay, which must accept rows that SlateDB wrote outside the range.
            key_ranges = KeyRanges(writable)
            check = WritableRangeCheck(key_ranges, opened.recovered.key_check)
            recovered = replace(opened.recovered, key_check=check)
            return Opened(fence, recovered, key_ranges)
    raise AssertionError("the last attempt returns or raises")


def _note_settled(env: Environment, ended: EndedWal, now: Versioned[Manifest]) -> Manifest:
    return note_settled(
        now.value,
        limit=env.settings.max_parallel_wal_writes,
        through=ended.last,
        manifest_id=ManifestId(now.next_id),
    )


def _find_frontier(env: Environment, manifest: Manifest) -> WalId:
    return find_frontier(env.wal_store, env.paths, manifest, pool=env.pool)


def _find_end(env: Environment, manifests: ManifestStore) -> WalId:
    """The last WAL file, after a hole was found before it.

    If files were flushed and collected meanwhile, the WAL has a hole as seen from an old manifest. Raises `CorruptData`
    if it has one as seen from the newest manifest, too: a fence in the hole would hide the files after it.
    """
    for attempt in range(_ATTEMPTS):
        latest = manifests.require_latest().value
        frontier = _find_frontier(env, latest)
        try:
            check_no_hole(env.wal_store, env.paths, frontier, allowed=allowed_hole(latest))
        except WalDamaged:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return frontier
    raise AssertionError("the last attempt returns or raises")


def find_or_create(
    store: ObjectStore,
    paths: DbPaths,
    manifests: ManifestStore,
    *,
    create: bool,
    extractor: SegmentExtractor | None,
    pool: IoPool,
) -> tuple[Versioned[Manifest], Writable]:
    """The current manifest, and the writable range. A crash leaves no database or an empty one.

    Raises:
        InvalidRequest: there is no database and `create` is False, it was destroyed, or it is a clone that is not
            finished.

    """
    requests: tuple[Callable[[], Any], ...] = (
        manifests.latest,
        partial(load_origin, store, paths),
    )
    current, origin = pool.map_ordered(lambda request: request(), requests)
    if current is not None:
        refuse_destroyed(current.value, store, paths)
        require_initialized(current.value, paths.root)
        return current, None if origin is None else origin.writable
    if origin is not None:
        raise InvalidRequest(
            f"a clone was begun at {paths.root!r} in {store.url} and has no manifest yet; repeat the call that makes "
            "it, or destroy it"
        )
    if not create:
        raise InvalidRequest(
            f"no database at {paths.root!r} in {store.url}; check the path, or open it with create=True"
        )
    name = None if extractor is None else extractor.name
    # If two processes create it at the same time, the loser uses the manifest of the winner.
    with suppress(SequencedConflict):
        return manifests.create_next(new_manifest(segment_extractor_name=name), None), None
    return manifests.require_latest(), None


def _replayed(env: Environment, fence: Fence, latest: Versioned[Manifest], ended: EndedWal) -> Opened:
    manifest, extractor = latest.value, env.extractor
    memtables = Memtables()
    last_seq, last_tick_ms = int(manifest.last_l0_seq), manifest.last_l0_clock_tick
    files = replay(
        env.wal_store,
        env.paths,
        manifest.replay_after_wal_id,
        WalId(ended.first - 1),  # the fences of this writer are empty
        skip_through_seq=manifest.last_l0_seq,
        writers=manifest.writer_epoch - 1,  # the fence of this writer is not replayed
        pool=env.pool,
    )
    previous = manifest.replay_after_wal_id
    segments = (
        None
        if extractor is None
        else SegmentCheck(extractor, (segment.prefix for segment in manifest.segments))
    )
    for file in _checked(files, segments):
        newest, latest_ms = file.insert_into(memtables.active)
        last_seq = max(last_seq, newest)
        if latest_ms is not None:
            last_tick_ms = max(last_tick_ms, latest_ms)
        if memtables.active.size() >= env.settings.l0_sst_size_bytes:
            memtables = memtables.freeze(
                last_seq=Seq(last_seq), last_tick_ms=last_tick_ms, replay_after=previous
            )
        previous = file.wal_id
    recovered = Recovered(latest, memtables.logged(), last_seq, last_tick_ms, ended.last, segments)
    return Opened(fence, recovered)


def _checked(files: Iterator[ReplayedFile], segments: SegmentCheck | None) -> Iterator[ReplayedFile]:
    """The same files. Raises here, and not at the first flush, if a key has no segment or does not fit a memtable."""
    for file in files:
        if file.content.has_long_key and (long := next(filter(is_long, file.rows), None)) is not None:
            raise InvalidRequest(
                f"WAL file {file.wal_id} holds a key of {len(long[0])} bytes, which SlateDB takes and this "
                "engine reads but does not write; open the database with SlateDB and close it, which moves it to an SST"
            )
        if segments is not None:
            segments.admit(row[0] for row in file.rows)
        yield file
