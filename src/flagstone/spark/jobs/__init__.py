"""Jobs that run on Spark's executors: compaction, verification and export."""
