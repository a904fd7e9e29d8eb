"""The official wheel and Flagstone read the same settings from a file."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from flagstone.config import (
    CompactorOptions,
    GarbageCollectorOptions,
    GcDetachOptions,
    GcDirectoryOptions,
    ObjectStoreCacheOptions,
    SchedulerOptions,
    Settings,
)

pytest.importorskip("slatedb", reason="the official wheel is the judge here")

# Prints its defaults, then the settings it parses from each text on standard input, one JSON object per line.
SCRIPT = """
import json, sys
from slatedb.uniffi import Settings
texts = json.load(sys.stdin)
print(Settings.default().to_json_string())
for text in texts:
    print(Settings.from_json_string(text).to_json_string())
"""

CHANGED = [
    Settings(compactor_options=None, garbage_collector_options=None, flush_interval=None),
    Settings(
        flush_interval=timedelta(milliseconds=2501),
        compression_codec="Zstd",
        metric_level="Debug",
        default_ttl_millis=2**63 - 1,
        object_store_max_retries=0,
        sst_block_size=65536,
        compactor_options=CompactorOptions(
            worker=None, scheduler_options=SchedulerOptions(include_size_threshold=2.5)
        ),
        object_store_cache_options=ObjectStoreCacheOptions(
            root_folder="/cache", max_cache_size_bytes=None, preload_disk_cache_on_startup="L0Sst"
        ),
        garbage_collector_options=GarbageCollectorOptions(
            manifest_options=None,
            wal_options=GcDirectoryOptions(interval=None, min_age=timedelta(0), dry_run=True),
            detach_options=GcDetachOptions(interval=timedelta(days=8)),
        ),
    ),
]


LAZY = Settings(
    max_parallel_wal_writes=2,
    compactor_options=CompactorOptions(
        scheduler_options=SchedulerOptions(compaction_policy="lazy-leveling", max_upper_runs=5)
    ),
)


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    texts = json.dumps([*(settings.to_slatedb_json() for settings in CHANGED), LAZY.to_json()])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=texts, capture_output=True, text=True, timeout=60, check=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_our_default_settings_are_those_of_the_wheel(answers: list[dict[str, Any]]) -> None:
    assert json.dumps(answers[0]) == Settings().to_slatedb_json()


def test_the_wheel_parses_our_settings_to_the_same_values(answers: list[dict[str, Any]]) -> None:
    for settings, answer in zip(CHANGED, answers[1:-1], strict=True):
        understood = Settings.from_dict({**answer, "sst_block_size": settings.sst_block_size})

        assert understood == settings


def test_the_wheel_keeps_our_policy_among_its_scheduler_options_and_drops_our_other_settings(
    answers: list[dict[str, Any]],
) -> None:
    assert "max_parallel_wal_writes" not in answers[-1]
    assert Settings.from_dict(answers[-1]).compactor_options == LAZY.compactor_options
