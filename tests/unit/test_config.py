"""Settings: defaults, files, environment, and the errors for invalid values."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.config import (
    CompactionWorkerOptions,
    CompactorOptions,
    GcFenceOptions,
    ObjectStoreCacheOptions,
    ReaderSettings,
    SchedulerOptions,
    Settings,
    format_duration,
    parse_duration,
)
from flagstone.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100ms", timedelta(milliseconds=100)),
        ("001ms", timedelta(milliseconds=1)),
        ("5s", timedelta(seconds=5)),
        (" 5 S ", timedelta(seconds=5)),
        ("10s", timedelta(seconds=10)),
        ("0s", timedelta(0)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("2s+500ms", timedelta(seconds=2.5)),
        ("1m + 30s", timedelta(seconds=90)),
        ("7days 30min", timedelta(days=7, minutes=30)),
        ("1M", timedelta(minutes=1)),
        ("2mon", timedelta(days=60)),
        ("1year 1week", timedelta(days=372)),
        ("1500us", timedelta(microseconds=1500)),
        ("7µs", timedelta(microseconds=7)),
        ("2000ns", timedelta(microseconds=2)),
    ],
)
def test_parse_duration_accepts_the_forms_of_slatedb(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "5",
        "0",
        "5s 3",
        "ms",
        "-5s",
        "1.5s",
        "5s+",
        "+5s",
        "1,5s",
        "5s;",
        "999ns",
        "9" * 30 + "y",
        "5parsec",
        "٣s5x",
    ],
)
def test_the_error_for_an_invalid_duration_says_what_is_wrong(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"duration|unknown unit|finer|longer"):
        parse_duration(text)


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=100_000)))
def test_format_duration_and_parse_duration_invert_each_other(value: timedelta) -> None:
    assert parse_duration(format_duration(value)) == value


def test_durations_are_normalised_on_construction() -> None:
    settings = Settings(flush_interval="250ms")  # type: ignore[arg-type]

    assert settings.flush_interval == timedelta(milliseconds=250)
    assert settings == Settings(flush_interval=timedelta(milliseconds=250))


def test_settings_compare_hash_and_pickle() -> None:
    settings = Settings(l0_max_ssts=3, compactor_options=CompactorOptions(worker=None))

    assert pickle.loads(pickle.dumps(settings)) == settings
    assert len({settings, settings.replace(l0_max_ssts=4), settings.replace()}) == 2
    with pytest.raises(AttributeError):
        settings.l0_max_ssts = 5  # type: ignore[misc]


CHANGED = Settings(
    flush_interval=None,
    compression_codec="Zstd",
    default_ttl_millis=5,
    metric_level="Debug",
    sst_block_size=65536,
    filter_bits_per_key=None,
    compactor_options=CompactorOptions(
        scheduler_options=SchedulerOptions(min_compaction_sources=2, include_size_threshold=2.5),
        worker=CompactionWorkerOptions(compactions_poll_interval=timedelta(milliseconds=1500)),
    ),
    object_store_cache_options=ObjectStoreCacheOptions(root_folder="/cache", max_cache_size_bytes=None),
    garbage_collector_options=None,
)


@pytest.mark.parametrize("settings", [Settings(), CHANGED])
def test_settings_survive_json(settings: Settings) -> None:
    assert Settings.from_json(settings.to_json()) == settings
    assert Settings.from_dict(settings.to_dict()) == settings


def test_to_slatedb_json_omits_settings_that_slatedb_lacks() -> None:
    ours = Settings().to_dict().keys() - Settings().to_dict(slatedb_only=True).keys()

    assert ours == {
        "sst_block_size",
        "filter_bits_per_key",
        "block_cache_bytes",
        "meta_cache_bytes",
        "max_wal_bytes",
        "max_parallel_wal_writes",
        "wal_hedge_after",
        "synchronous_commit",
        "on_clock_regression",
        "memory_budget",
        "price_list",
    }
    assert json.loads(Settings().to_slatedb_json()) == Settings().to_dict(slatedb_only=True)


def test_scheduler_options_are_written_as_text_and_only_if_they_differ_from_the_default() -> None:
    options = CHANGED.to_dict()["compactor_options"]["scheduler_options"]

    assert options == {"min_compaction_sources": "2", "include_size_threshold": "2.5"}
    assert SchedulerOptions.from_dict({"max_compaction_sources": 9}).max_compaction_sources == 9


LAZY = SchedulerOptions(
    compaction_policy="lazy-leveling",
    last_run_ratio=2.5,
    max_upper_runs=5,
    space_driven=True,
    min_dead_share=0.25,
)


def test_the_compaction_policy_is_text_in_files_and_not_in_the_settings_for_slatedb() -> None:
    settings = Settings(
        compactor_options=CompactorOptions(scheduler_options=LAZY.replace(min_compaction_sources=3))
    )

    assert settings.to_dict()["compactor_options"]["scheduler_options"] == {
        "min_compaction_sources": "3",
        "compaction_policy": "lazy-leveling",
        "last_run_ratio": "2.5",
        "max_upper_runs": "5",
        "space_driven": "true",
        "min_dead_share": "0.25",
    }
    assert Settings.from_json(settings.to_json()) == settings
    theirs = json.loads(settings.to_slatedb_json())["compactor_options"]["scheduler_options"]
    assert theirs == {"min_compaction_sources": "3"}


def test_the_environment_and_files_choose_the_compaction_policy(tmp_path: Path) -> None:
    (tmp_path / "SlateDb.toml").write_text(
        '[compactor_options.scheduler_options]\ncompaction_policy = "lazy-leveling"\nmax_upper_runs = "5"\n'
    )
    environ = {
        f"SLATEDB_COMPACTOR_OPTIONS.SCHEDULER_OPTIONS.{name}": value
        for name, value in (("LAST_RUN_RATIO", "2.5"), ("SPACE_DRIVEN", "true"), ("MIN_DEAD_SHARE", "0.25"))
    }

    settings = Settings.load(tmp_path, environ=environ)

    assert settings.compactor_options is not None
    assert settings.compactor_options.scheduler_options == LAZY


def test_settings_that_are_not_given_keep_their_defaults() -> None:
    settings = Settings.from_dict({"garbage_collector_options": {"wal_fence_options": {"interval": None}}})

    assert settings.garbage_collector_options is not None
    assert settings.garbage_collector_options.wal_fence_options == GcFenceOptions(interval=None, dry_run=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"l0_sst_size": 1}, "l0_sst_size: unknown setting; did you mean l0_sst_size_bytes?"),
        ({"zebra": 1}, "zebra: unknown setting"),
        (
            {"compactor_options": {"worker": {"max_sst_siz": 1}}},
            "compactor_options.worker.max_sst_siz: unknown setting; did you mean max_sst_size?",
        ),
        (
            {"compactor_options": {"scheduler_options": {"min_sources": "2"}}},
            "compactor_options.scheduler_options.min_sources: unknown setting",
        ),
        ({"l0_max_ssts": 0}, "l0_max_ssts: 0 is out of range; choose 1 to"),
        ({"min_filter_keys": 2**32}, "min_filter_keys: 4294967296 is out of range; choose 0 to 4294967295"),
        ({"l0_max_ssts": 1.5}, "l0_max_ssts: 1.5 is not a whole number"),
        ({"l0_max_ssts": True}, "l0_max_ssts: True is not a whole number"),
        ({"l0_max_ssts": None}, "l0_max_ssts: None is not a whole number"),
        ({"wal_enabled": 1}, "wal_enabled: 1 is not true or false"),
        ({"flush_interval": 5}, "flush_interval: 5 has no unit; use a timedelta or text such as '5s'"),
        ({"flush_interval": "0s"}, "flush_interval: 0s is out of range; choose 1ms or more"),
        ({"flush_interval": timedelta(-1)}, "flush_interval: -1 day, 0:00:00 is out of range"),
        ({"manifest_poll_interval": None}, "manifest_poll_interval: None is not a duration"),
        ({"compression_codec": "zstd"}, "compression_codec: 'zstd' is not one of Snappy, Zlib, Lz4, Zstd"),
        ({"metric_level": "Trace"}, "metric_level: 'Trace' is not one of Debug, Info"),
        ({"sst_block_size": 5000}, "sst_block_size: 5000 is not one of 1024, 2048"),
        ({"filter_bits_per_key": 0}, "filter_bits_per_key: 0 is out of range; choose 1 to 1000"),
        ({"compactor_options": 5}, "compactor_options: 5 is not a section of settings"),
        ({"object_store_cache_options": None}, "object_store_cache_options: None is not a section"),
        ({"object_store_cache_options": {"root_folder": ""}}, "object_store_cache_options.root_folder: ''"),
        ({"default_ttl_millis": -1}, "default_ttl_millis: -1 is out of range"),
        ({"max_unflushed_bytes": 1000}, "max_unflushed_bytes: 1000 is out of range; choose 67108864"),
        (
            {"object_store_cache_options": {"max_cache_size_bytes": 5_000_000}},
            "object_store_cache_options.max_cache_size_bytes: 5000000 is out of range; choose 8388608",
        ),
        (
            {"compactor_options": {"worker_heartbeat_timeout": "10s"}},
            "compactor_options.worker_heartbeat_timeout: 0:00:10 is out of range",
        ),
        (
            {"compactor_options": {"scheduler_options": {"compaction_policy": "lazy-levelling"}}},
            "compactor_options.scheduler_options.compaction_policy: 'lazy-levelling' is not one of size-tiered",
        ),
        (
            {"compactor_options": {"scheduler_options": {"max_compaction_sources": "3"}}},
            "compactor_options.scheduler_options.max_compaction_sources: 3 is out of range; choose 4",
        ),
        (
            {"compactor_options": {"scheduler_options": {"include_size_threshold": "0.5"}}},
            "compactor_options.scheduler_options.include_size_threshold: 0.5 is out of range; choose 1.0",
        ),
    ],
)
def test_the_error_for_a_setting_has_its_name_the_value_and_the_allowed_values(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings.from_dict(values)

    assert str(refusal.value).startswith(message)
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)


def test_replace_with_an_unknown_name_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="l0_max_sst: unknown setting; did you mean l0_max_ssts"):
        Settings().replace(l0_max_sst=3)


def test_a_metric_level_may_be_spelled_in_any_case() -> None:
    assert Settings.from_dict({"metric_level": "debug"}).metric_level == "Debug"
    assert Settings.from_dict({"metric_level": "INFO"}).metric_level == "Info"


@pytest.mark.parametrize(("lifetime", "poll"), [("19s", "10s"), ("999ms", "1ms")])
def test_a_reader_checkpoint_must_outlive_two_polls_and_one_second(lifetime: str, poll: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^checkpoint_lifetime: "):
        ReaderSettings.from_dict({"checkpoint_lifetime": lifetime, "manifest_poll_interval": poll})


FILES = {
    "SlateDb.json": '{"flush_interval": "1s", "l0_max_ssts": 5, "compactor_options": {"poll_interval": "9s"}}',
    "SlateDb.toml": 'flush_interval = "2s"\nl0_max_ssts_per_key = 6\n[compactor_options.worker]\nmax_sst_size = 7\n',
    "SlateDb.yaml": "flush_interval: 3s\ncompression_codec: Lz4\nwal_enabled: false\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("name", "seconds"), [("SlateDb.json", 1), ("SlateDb.toml", 2), ("SlateDb.yaml", 3)])
def test_a_file_is_read_by_its_extension(folder: Path, name: str, seconds: int) -> None:
    assert Settings.from_file(folder / name).flush_interval == timedelta(seconds=seconds)


def test_load_merges_files_and_environment(folder: Path) -> None:
    loaded = Settings.load(folder, environ={"SLATEDB_L0_MAX_SSTS": "11"})

    assert loaded == Settings(
        flush_interval=timedelta(seconds=3),
        l0_max_ssts=11,
        l0_max_ssts_per_key=6,
        compression_codec="Lz4",
        wal_enabled=False,
        compactor_options=CompactorOptions(
            poll_interval=timedelta(seconds=9), worker=CompactionWorkerOptions(max_sst_size=7)
        ),
    )


def test_load_without_files_returns_the_defaults(tmp_path: Path) -> None:
    assert Settings.load(tmp_path, environ={}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "[]", "not list"),
        ("a.toml", "a =", "not TOML"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "- 1", "not list"),
        ("a.ini", "", "ends in .json, .toml, .yaml or .yml"),
        ("a.json", '{"wal_enable": true}', "did you mean wal_enabled"),
        ("a.toml", b"\xff", "cannot be read"),
    ],
)
def test_the_error_for_an_invalid_file_names_the_file(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(InvalidRequest, match=message) as refusal:
        Settings.from_file(path)
    assert any(name in note for note in refusal.value.__notes__)


def test_a_missing_file_is_an_error_and_an_empty_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")

    assert Settings.from_file(tmp_path / "empty.yaml") == Settings()
    with pytest.raises(InvalidRequest, match="there is no settings file"):
        Settings.from_file(tmp_path / "missing.toml")


def test_a_dot_in_a_variable_separates_section_and_field() -> None:
    environ = {
        "SLATEDB_FLUSH_INTERVAL": "250ms",
        "SLATEDB_WAL_ENABLED": "false",
        "SLATEDB_COMPRESSION_CODEC": "Zstd",
        "SLATEDB_SST_BLOCK_SIZE": "8192",
        "SLATEDB_OBJECT_STORE_CACHE_OPTIONS.ROOT_FOLDER": "/x",
        "SLATEDB_COMPACTOR_OPTIONS.WORKER.MAX_SST_SIZE": "1000",
        "SLATEDB_COMPACTOR_OPTIONS.SCHEDULER_OPTIONS.MIN_COMPACTION_SOURCES": '"2"',
        "SLATEDB_GARBAGE_COLLECTOR_OPTIONS": "null",
        "FLUSH_INTERVAL": "1s",
    }

    assert Settings.from_env(environ=environ) == Settings(
        flush_interval=timedelta(milliseconds=250),
        wal_enabled=False,
        compression_codec="Zstd",
        sst_block_size=8192,
        object_store_cache_options=ObjectStoreCacheOptions(root_folder="/x"),
        compactor_options=CompactorOptions(
            worker=CompactionWorkerOptions(max_sst_size=1000),
            scheduler_options=SchedulerOptions(min_compaction_sources=2),
        ),
        garbage_collector_options=None,
    )


def test_the_environment_changes_only_its_own_settings_of_a_base() -> None:
    base = Settings(l0_max_ssts=3, compactor_options=None)
    environ = {"APP_COMPACTOR_OPTIONS.POLL_INTERVAL": "2s", "SLATEDB_L0_MAX_SSTS": "5"}

    assert Settings.from_env("APP_", base, environ=environ) == base.replace(
        compactor_options=CompactorOptions(poll_interval=timedelta(seconds=2))
    )


def test_the_environment_may_give_a_whole_section_and_then_a_field_of_it() -> None:
    environ = {
        "SLATEDB_COMPACTOR_OPTIONS": '{"worker": null, "poll_interval": "1s"}',
        "SLATEDB_COMPACTOR_OPTIONS.POLL_INTERVAL": "2s",
    }

    assert Settings.from_env(environ=environ).compactor_options == CompactorOptions(
        worker=None, poll_interval=timedelta(seconds=2)
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FLUSH_INTERVALL", "1s", "flush_intervall: unknown setting; did you mean flush_interval"),
        ("COMPACTOR_OPTIONS.WORKER.ZEBRA", "1", r"compactor_options\.worker\.zebra: unknown setting"),
        ("COMPACTOR_OPTIONS__POLL_INTERVAL", "1", "separated by a dot"),
        ("WAL_ENABLED.X", "1", "wal_enabled is not a section"),
        ("WAL_ENABLED", "yes", "wal_enabled: 'yes' is not true or false"),
        ("L0_MAX_SSTS", "many", "l0_max_ssts: 'many' is not a whole number"),
        ("L0_MAX_SSTS", "-1", "l0_max_ssts: -1 is out of range"),
        ("COMPACTOR_OPTIONS", "{", "compactor_options: '{' is not a section"),
        ("COMPACTOR_OPTIONS.SCHEDULER_OPTIONS.INCLUDE_SIZE_THRESHOLD", "big", "'big' is not a number"),
    ],
)
def test_a_misspelled_or_invalid_variable_raises_invalid_request(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Settings.from_env(environ={f"SLATEDB_{name}": value})


def test_a_variable_that_is_similar_to_no_setting_is_ignored() -> None:
    assert Settings.from_env(environ={"SLATEDB_HOME": "/x", "SLATEDB_": "y"}) == Settings()
