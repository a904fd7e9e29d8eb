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
    "mark_logged_after_upload": Found(2, 0.5, 1151),
    "durable_through_last_seq": Found(11, 0.3, 1056),
    "skip_ownership": Found(1, 0.5, 1202),
    "no_fence": Found(1, 0.01, 2),
    "replay_too_late": Found(1, 0.05, 112),
    "replay_flushed_rows": Found(3, 0.1, 345),
    "reuse_sequence_number": Found(1, 0.05, 104),
    "reader_trims_by_insert": Found(3, 0.2, 525),
    "reader_never_trims": Found(1, 0.01, 32),
    "drop_memtable_before_commit": Found(1, 0.1, 332),
    "keep_flushed_memtable": Found(3, 0.5, 1369),
    "split_batch": Found(2, 0.5, 1238),
    "skip_write_conflicts": Found(1, 0.05, 106),
    "skip_read_conflicts": Found(1, 0.3, 727),
    "replay_after_commit": Found(1, 0.1, 348),
    "last_seen_too_high": Found(1, 0.2, 443),
    "flush_applied_twice": Found(4, 0.5, 1674),
    "drop_tombstones": Found(1, 0.1, 290),
    "drop_expired_rows": Found(2, 0.3, 979),
    "commit_stale_compaction": Found(10, 0.5, 1314),
    "stop_before_last_key": Found(1, 0.01, 2),
    "start_after_first_key": Found(2, 0.2, 537),
    "skip_fence_check": Found(5, 0.5, 1252),
    "manifest_written_again": Found(1, 0.01, 19),
    "adopt_older_manifest": Found(2, 0.05, 121),
    "skip_boundary": Found(10, 0.3, 751),
    "trust_lost_reply": Found(2, 0.05, 153),
    "trust_any_winner": Found(6, 0.02, 63),
    "deny_own_write": Found(1, 0.05, 76),
    "no_boundary": Found(20, 1, 853),
    "collect_checkpointed_ssts": Found(2, 0.2, 583),
    "collect_checkpointed_manifests": Found(2, 0.2, 579),
    "collect_checkpointed_wal": Found(1, 0.2, 516),
    "collect_wal_after_replay": Found(6, 1, 2043),
    "collect_output_of_flushes": Found(11, 1, 2436),
}

MISSED: Final[dict[str, str]] = {
    "boundary_from_memory": "as for skip_boundary, but the process must also not have read the boundary since",
    "delete_before_boundary": "a process must create the manifest between its deletion and the boundary",
    "collect_output_of_jobs": "a compaction must wait between upload and commit for longer than the age of garbage",
    "flush_ignores_snapshots": "a snapshot keeps its view, and takes a newer one only after a checkpoint is lost",
    "compaction_ignores_snapshots": "as for flush_ignores_snapshots",
}
"""Planted bugs that no recorded world finds yet, and what such a world needs."""
