"""Worlds that find the planted bugs: seed, hours of trouble, and the simulated seconds until the bug shows.

`python -m flagstone.testing.simulate --hunt` searches them again; a change of what a seed draws makes that necessary.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Found(NamedTuple):
    """A world that finds a planted bug after so many simulated seconds."""

    seed: int
    hours: float
    after_s: int

    def __repr__(self) -> str:
        return f"Found({self.seed}, {self.hours:g}, {self.after_s})"


FOUND: Final[dict[str, Found]] = {
    "acknowledge_before_upload": Found(3, 0.01, 6),
    "mark_logged_after_upload": Found(3, 0.05, 104),
    "durable_through_last_seq": Found(11, 0.3, 1056),
    "skip_ownership": Found(1, 1, 2079),
    "no_fence": Found(1, 0.01, 2),
    "fence_one_id": Found(9, 0.2, 396),
    "finish_any_file": Found(2, 0.05, 75),
    "replay_too_late": Found(1, 0.05, 112),
    "replay_flushed_rows": Found(3, 0.5, 1643),
    "reuse_sequence_number": Found(1, 0.05, 104),
    "damaged_wal_is_empty": Found(1, 0.05, 118),
    "await_no_upload": Found(2, 0.2, 497),
    "reader_trims_by_insert": Found(3, 0.1, 204),
    "reader_never_trims": Found(1, 0.01, 32),
    "drop_memtable_before_commit": Found(1, 0.2, 522),
    "keep_flushed_memtable": Found(2, 0.5, 1299),
    "split_batch": Found(2, 0.5, 1633),
    "skip_write_conflicts": Found(1, 0.05, 106),
    "skip_read_conflicts": Found(3, 0.05, 107),
    "skip_range_conflicts": Found(3, 0.1, 218),
    "replay_after_commit": Found(2, 0.3, 883),
    "last_seen_too_high": Found(1, 0.2, 443),
    "flush_applied_twice": Found(7, 0.3, 796),
    "drop_tombstones": Found(1, 0.02, 56),
    "drop_expired_rows": Found(2, 0.5, 1229),
    "commit_stale_compaction": Found(15, 0.3, 897),
    "cut_under_old_ids": Found(2, 0.2, 394),
    "stop_before_last_key": Found(1, 0.01, 2),
    "start_after_first_key": Found(2, 0.2, 537),
    "skip_fence_check": Found(1, 0.1, 351),
    "manifest_written_again": Found(2, 0.02, 61),
    "adopt_older_manifest": Found(3, 0.5, 1631),
    "restored_without_step": Found(1, 0.01, 30),
    "trust_lost_reply": Found(2, 0.3, 776),
    "trust_any_winner": Found(7, 0.1, 310),
    "deny_own_write": Found(1, 0.05, 76),
    "skip_boundary": Found(1, 0.3, 988),
    "boundary_from_memory": Found(5, 0.3, 745),
    "delete_before_boundary": Found(2, 1, 3011),
    "no_boundary": Found(1, 0.3, 739),
    "collect_checkpointed_ssts": Found(2, 0.2, 583),
    "collect_checkpointed_manifests": Found(2, 0.2, 579),
    "collect_checkpointed_wal": Found(1, 0.2, 516),
    "collect_wal_after_replay": Found(27, 1, 1993),
    "collect_output_of_flushes": Found(16, 0.5, 1385),
}

MISSED: Final[dict[str, str]] = {
    "restored_with_wal": "a write must come while the restore commits: replay skips all rows before it anyway",
    "collect_output_of_jobs": "a compaction must wait between upload and commit for longer than the age of garbage",
    "flush_ignores_snapshots": "a snapshot keeps its view, and takes a newer one only after a checkpoint is lost",
    "compaction_ignores_snapshots": "as for flush_ignores_snapshots",
}
"""Planted bugs that no recorded world finds yet, and what such a world needs."""
