"""Becoming the writer of a database: find it or create it, claim it, fence the log, replay what it holds.

The order is the protocol's (and SlateDB's). Whatever step a crash falls on, the next opening starts over: the
worst it finds is an epoch nobody uses and an empty file in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from flagstone.clones.checkpoint import require_initialized
from flagstone.clones.origin import Writable, destroyed_database, load_origin, refuse_destroyed
from flagstone.errors import Closed, InvalidRequest
from flagstone.lsm.segments import SegmentExtractor, check_extractor
from flagstone.metadata.fencing import Fence, claim_writer
from flagstone.metadata.manifest import Manifest, new_manifest
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import is_long
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import Seq, WalId
from flagstone.wal.frontier import WalDamaged, check_no_hole, find_frontier, write_fence
from flagstone.wal.replay import ReplayedFile, WalTruncated, replay
from flagstone.write.key_check import KeyRanges, SegmentCheck, WritableRangeCheck
from flagstone.write.state import Memtables
from flagstone.write.writer_state import Recovered

_ATTEMPTS = 3
FIRST_MANIFEST: Final = 1


@dataclass(frozen=True, slots=True)
class Opened:
    """The claim to the database, its recovered state, and its writable range if it has one."""

    fence: Fence
    recovered: Recovered
    key_ranges: KeyRanges | None = None


def open_for_writing(
    store: ObjectStore,
    wal_store: ObjectStore,
    paths: DbPaths,
    manifests: ManifestStore,
    *,
    create: bool,
    extractor: SegmentExtractor | None,
    freeze_bytes: int,
    pool: IoPool,
) -> Opened:
    """Claim the database and read what its log holds.

    Raises:
        InvalidRequest: there is no database and `create` is False, the segment extractor is not the one it
            was created with, it was destroyed, or it is a clone that is not finished.
        Closed: another writer claimed it while we did; it owns the database now.
        CorruptData: a manifest or a file of the WAL is damaged, or a file of it is missing.

    """
    current, writable = _find_or_create(
        store, paths, manifests, create=create, extractor=extractor, pool=pool
    )
    check_extractor(
        extractor,
        stored_name=current.value.segment_extractor_name,
        prefixes=(segment.prefix for segment in current.value.segments),
    )
    # Looked for before the claim: the former writer may add files until the fence is there.
    frontier = _find_frontier(wal_store, paths, current.value, pool=pool)
    # The first manifest names no writer yet: there is no WAL that could have a hole.
    no_hole = (
        None
        if current.id == FIRST_MANIFEST
        else pool.submit(check_no_hole, wal_store, paths, frontier)  # beside the claim, which takes as long
    )
    try:
        fence, claimed = claim_writer(manifests)
    except Closed:
        # Destroyed since we looked: the mark is in the manifest, so no claim comes after it.
        raise destroyed_database(store, paths) from None
    try:
        if no_hole is not None:
            no_hole.result()
    except WalDamaged:
        frontier = _find_end(wal_store, paths, manifests, pool=pool)

    def refresh() -> Manifest:
        latest = manifests.require_latest()
        fence.check(latest.value)
        return latest.value

    fence_id = write_fence(wal_store, paths, WalId(frontier + 1), claimed.value, refresh=refresh, pool=pool)
    for attempt in range(_ATTEMPTS):
        # Once more: the former writer may have flushed a memtable between the claim and the fence. After a failed
        # replay `poll` is not enough: it misses a manifest that was deleted soon after it was written, as a destroyer
        # does with the one that carries its mark.
        latest = manifests.poll() if attempt == 0 else manifests.require_latest()
        fence.check(latest.value)
        try:
            opened = _replayed(
                wal_store,
                paths,
                fence,
                latest,
                fence_id,
                extractor=extractor,
                freeze_bytes=freeze_bytes,
                pool=pool,
            )
        except (WalTruncated, WalDamaged):
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            if writable is None:
                return opened
            # Not for replay: what SlateDB wrote outside of the range is there and stays readable.
            key_ranges = KeyRanges(writable)
            check = WritableRangeCheck(key_ranges, opened.recovered.key_check)
            recovered = replace(opened.recovered, key_check=check)
            return Opened(fence, recovered, key_ranges)
    raise AssertionError("the last attempt returns or raises")


def _find_frontier(wal_store: ObjectStore, paths: DbPaths, manifest: Manifest, *, pool: IoPool) -> WalId:
    return find_frontier(
        wal_store, paths, manifest.replay_after_wal_id, expected=manifest.wal_id_last_seen, pool=pool
    )


def _find_end(wal_store: ObjectStore, paths: DbPaths, manifests: ManifestStore, *, pool: IoPool) -> WalId:
    """The last file of the WAL, where a hole was found in front of it.

    Files that were flushed and collected since leave a hole in what an old manifest asks for. Raises `CorruptData` if
    the newest one asks for it, too: a fence there would hide the files behind it.
    """
    for attempt in range(_ATTEMPTS):
        frontier = _find_frontier(wal_store, paths, manifests.require_latest().value, pool=pool)
        try:
            check_no_hole(wal_store, paths, frontier)
        except WalDamaged:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return frontier
    raise AssertionError("the last attempt returns or raises")


def _find_or_create(
    store: ObjectStore,
    paths: DbPaths,
    manifests: ManifestStore,
    *,
    create: bool,
    extractor: SegmentExtractor | None,
    pool: IoPool,
) -> tuple[Versioned[Manifest], Writable]:
    """The current manifest, and the keys that may be written."""
    looks: tuple[Callable[[], Any], ...] = (
        manifests.latest,
        partial(load_origin, store, paths),
    )
    current, origin = pool.map_ordered(lambda look: look(), looks)
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
    # Two processes may create it at the same time: the one that lost uses what the other made.
    with suppress(SequencedConflict):
        return manifests.create_next(new_manifest(segment_extractor_name=name), None), None
    return manifests.require_latest(), None


def _replayed(
    wal_store: ObjectStore,
    paths: DbPaths,
    fence: Fence,
    latest: Versioned[Manifest],
    fence_id: WalId,
    *,
    extractor: SegmentExtractor | None,
    freeze_bytes: int,
    pool: IoPool,
) -> Opened:
    manifest = latest.value
    memtables = Memtables()
    last_seq, last_tick_ms = int(manifest.last_l0_seq), manifest.last_l0_clock_tick
    files = replay(
        wal_store,
        paths,
        manifest.replay_after_wal_id,
        WalId(fence_id - 1),  # the fence is our own, and empty
        skip_through_seq=manifest.last_l0_seq,
        writers=manifest.writer_epoch - 1,  # our own fence is behind what is replayed
        pool=pool,
    )
    previous = manifest.replay_after_wal_id
    segments = (
        None
        if extractor is None
        else SegmentCheck(extractor, (segment.prefix for segment in manifest.segments))
    )
    for file in _checked(files, segments):
        newest, latest_ms = memtables.active.insert_rows(file.rows)
        last_seq = max(last_seq, newest)
        if latest_ms is not None:
            last_tick_ms = max(last_tick_ms, latest_ms)
        if memtables.active.size() >= freeze_bytes:
            memtables = memtables.freeze(
                last_seq=Seq(last_seq), last_tick_ms=last_tick_ms, replay_after=previous
            )
        previous = file.wal_id
    recovered = Recovered(latest, memtables.logged(), last_seq, last_tick_ms, fence_id, segments)
    return Opened(fence, recovered)


def _checked(files: Iterator[ReplayedFile], segments: SegmentCheck | None) -> Iterator[ReplayedFile]:
    """The same files; keys that no segment or no memtable can take are found now, not at the first flush."""
    for file in files:
        long = next(filter(is_long, file.rows), None)
        if long is not None:
            raise InvalidRequest(
                f"file {file.wal_id} of the WAL holds a key of {len(long[0])} bytes, which SlateDB takes and this "
                "engine reads but does not write; open the database with SlateDB and close it, which moves it to an SST"
            )
        if segments is not None:
            segments.admit(row[0] for row in file.rows)
        yield file
