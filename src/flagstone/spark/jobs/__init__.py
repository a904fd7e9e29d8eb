"""Jobs that use executors as workers: compaction, verification and export."""
