"""Random writes, jobs, checkpoints and rounds of collection: every reachable object exists at every step."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flagstone.metadata.compactions import JobStatus
from flagstone.metadata.manifest import SsTable, remove_checkpoint
from flagstone.types import ManifestId, WalId
from kit.garbage import GarbageWorld


class Database(RuleBasedStateMachine):
    """One database. `uploaded` is an SST that is not flushed yet, `output` one of the running job."""

    def __init__(self) -> None:
        super().__init__()
        self.world = GarbageWorld()
        self.uploaded: SsTable | None = None
        self.output: SsTable | None = None

    @rule(seconds=st.sampled_from([0.001, 1, 30, 61, 1000]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(count=st.integers(1, 3), fence=st.booleans())
    def log(self, count: int, fence: bool) -> None:
        self.world.write_wal(count, data=b"" if fence else b"rows of a WAL file")

    @rule()
    def orphan(self) -> None:
        self.world.upload()

    @precondition(lambda self: self.uploaded is None)
    @rule()
    def upload(self) -> None:
        newest = self.world.manifests.require_latest().value.newest_l0
        self.uploaded = self.world.upload(self.world.ids.ulid(0 if newest is None else newest >> 80))

    @rule()
    def flush(self) -> None:
        self.world.flush(self.uploaded)
        self.uploaded = None

    @precondition(lambda self: self.output is None)
    @rule()
    def begin_job(self) -> None:
        latest = self.world.compactions.latest()
        newest = latest.value.newest_job if latest else None
        job = self.world.job(job_id=self.world.ids.ulid(0 if newest is None else newest >> 80))
        self.output = self.world.upload(self.world.ids.ulid(job.id >> 80))

    @precondition(lambda self: self.output is not None)
    @rule(fails=st.booleans(), now=st.sampled_from([False, False, True]))
    def end_job(self, fails: bool, now: bool = True) -> None:
        if not now:
            return
        if not fails:
            self.world.compact(output=self.output)
        self.output = None
        status = JobStatus.FAILED if fails else JobStatus.COMPLETED
        self.world.compactions.update(
            lambda now: replace(
                now.value,
                jobs=tuple(
                    job
                    if job.status.finished
                    else replace(job, status=status if fails else JobStatus.COMPACTED)
                    for job in now.value.jobs
                ),
            )
        )
        self.world.compactions.update(
            lambda now: replace(
                now.value,
                jobs=tuple(
                    job if job.status.finished else replace(job, status=status) for job in now.value.jobs[-1:]
                ),
            )
        )

    @rule(seconds=st.sampled_from([None, 5, 500]))
    def checkpoint(self, seconds: int | None) -> None:
        self.world.checkpoint(lifetime=None if seconds is None else timedelta(seconds=seconds))

    @rule()
    def release_checkpoint(self) -> None:
        held = self.world.manifests.require_latest().value.checkpoints
        if held:
            self.world.manifests.update(lambda now: remove_checkpoint(now.value, held[0].id))

    @rule()
    def claim(self) -> None:
        self.world.claim()

    @rule(min_age_s=st.sampled_from([0, 0, 60]), dry_run=st.sampled_from([False, False, True]))
    def collect(self, min_age_s: float, dry_run: bool) -> None:
        report = self.world.collect(min_age_s=min_age_s, dry_run=dry_run)
        assert report.ok, report.errors

    @invariant()
    def ids_differ_in_time(self) -> None:
        self.world.advance(0.001)

    @invariant()
    def everything_reachable_is_there(self) -> None:
        assert self._needed() <= {meta.path for meta in self.world.store.list("db")}

    def teardown(self) -> None:
        """After two more rounds only needed objects are left."""
        world = self.world
        if self.output is not None:
            self.end_job(fails=True)
        if self.uploaded is not None:
            self.flush()
        world.advance(1000)
        world.flush()
        for _ in range(2):
            assert world.collect(min_age_s=0).ok
        fence_or_compactions = {
            meta.path
            for meta in world.store.list("db")
            if "/compactions/" in meta.path or meta.path.startswith("db/gc/")
        }
        assert {meta.path for meta in world.store.list("db")} - fence_or_compactions == self._needed()
        assert len([path for path in fence_or_compactions if "/compactions/" in path]) <= 1

    def _needed(self) -> set[str]:
        world, paths = self.world, self.world.paths
        latest = world.manifests.require_latest()
        now_s = world.clock.now_ms() // 1000
        saved = {
            entry.manifest_id
            for entry in latest.value.checkpoints
            if entry.expires_s is None or entry.expires_s > now_s
        }
        needed = {paths.manifest(ManifestId(latest.id)), *map(paths.manifest, saved)}
        reached = [latest.value, *(world.manifests.load(version) for version in saved)]
        needed |= {paths.sst(sst_id) for manifest in reached for sst_id in manifest.ssts}
        needed |= {paths.sst(sst.id) for sst in (self.uploaded, self.output) if sst is not None}
        wal_ids = set(range(max(1, latest.value.replay_after_wal_id), world.last_wal + 1))
        for manifest in reached[1:]:
            wal_ids |= set(range(manifest.replay_after_wal_id + 1, manifest.wal_id_last_seen + 1))
        return needed | {paths.wal(WalId(wal_id)) for wal_id in wal_ids}


@pytest.mark.slow
class TestDatabase(Database.TestCase):  # type: ignore[misc, name-defined]
    pass


TestDatabase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
