"""Every setting, with SlateDB's names, defaults and spelling: a SlateDb.toml that works there works here.

Durations are `timedelta`; text such as ``"100ms"`` is accepted wherever one is, and turned into it. Whole sections
may be given as mappings. A None switches off what its field names. Settings are values: they compare, hash, pickle,
and change only into new ones (`replace`).
"""

# ruff: noqa: RUF009 - the functions called in the class bodies make dataclass fields
from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, Self

from flagstone.config.fields import (
    U32_MAX,
    Kind,
    Section,
    SettingRefused,
    boolean,
    choice,
    duration,
    folder,
    integer,
    nested_section,
    number,
    section,
    suggestion,
)
from flagstone.errors import InvalidRequest

CodecName = Literal["Snappy", "Zlib", "Lz4", "Zstd"]
MetricLevel = Literal["Debug", "Info"]
Preload = Literal["L0Sst", "AllSst"]
ClockRegression = Literal["refuse", "hold"]

CODECS: Final = ("Snappy", "Zlib", "Lz4", "Zstd")
ENV_PREFIX: Final = "SLATEDB_"

FILE_NAMES: Final = ("SlateDb.json", "SlateDb.toml", "SlateDb.yaml", "SlateDb.yml")
"""In the order in which `Settings.load` lays them over each other."""

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_GIB: Final = 1024 * _MIB
_BLOCK_SIZES: Final = tuple(_KIB << shift for shift in range(7))
_METRIC_LEVELS: Final = ("Debug", "Info")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions(Section):
    """When the size-tiered scheduler merges runs of similar size.

    SlateDB keeps these as texts in a free mapping, empty by default; so do `to_dict` and the files.
    """

    min_compaction_sources: int = integer(4, minimum=1)
    max_compaction_sources: int = integer(8, minimum=1)
    include_size_threshold: float = number(4.0, minimum=1.0)

    def check(self) -> None:
        if self.max_compaction_sources < self.min_compaction_sources:
            raise SettingRefused(
                "max_compaction_sources",
                f"{self.max_compaction_sources} is out of range; "
                f"choose {self.min_compaction_sources} (min_compaction_sources) or more",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        kinds = cls.kinds()
        read = {
            name: kinds[name].of_text(value) if name in kinds and isinstance(value, str) else value
            for name, value in values.items()
        }
        # Zero-argument super() does not survive the class being rebuilt with slots.
        return super(SchedulerOptions, cls).from_dict(read)

    def to_dict(self, *, slatedb_only: bool = False) -> dict[str, Any]:  # noqa: ARG002 - all are SlateDB's
        return {
            entry.name: str(getattr(self, entry.name))
            for entry in fields(self)
            if getattr(self, entry.name) != entry.default
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionWorkerOptions(Section):
    """How one process executes compaction jobs."""

    max_concurrent_compactions: int = integer(4, minimum=1)
    compactions_poll_interval: timedelta = duration("5s")
    heartbeat_interval: timedelta = duration("10s")
    max_sst_size: int = integer(256 * _MIB, minimum=1)
    max_fetch_tasks: int = integer(4, minimum=1)
    bytes_to_fetch: int = integer(2 * _MIB, minimum=1)
    max_subcompactions: int = integer(4, minimum=1)
    min_filter_keys: int = integer(1000, maximum=U32_MAX)
    """Used by a worker in a process of its own; one inside a database follows the database's settings."""
    compression_codec: CodecName | None = choice(None, *CODECS, optional=True)
    """Used by a worker in a process of its own, like `min_filter_keys`."""
    metric_level: MetricLevel | None = choice(None, *_METRIC_LEVELS, any_case=True, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactorOptions(Section):
    """How compactions are decided and committed. Without a `worker` others have to execute them."""

    poll_interval: timedelta = duration("5s")
    """How often the store is asked what others did. Inside an idle writer it becomes three times as long."""
    manifest_update_timeout: timedelta = duration("300s")
    max_concurrent_compactions: int = integer(4, minimum=1)
    enable_trivial_move: bool = boolean(False)
    scheduler_options: SchedulerOptions = section(SchedulerOptions())
    worker: CompactionWorkerOptions | None = section(CompactionWorkerOptions(), optional=True)
    metric_level: MetricLevel | None = choice(None, *_METRIC_LEVELS, any_case=True, optional=True)
    commit_compacted_interval: timedelta = duration("1s")
    """How often instead, while workers in other processes have jobs."""
    checkpoint_lifetime: timedelta = duration("900s", minimum="1s")
    """How long readers may keep using tables that a compaction has replaced."""
    worker_heartbeat_timeout: timedelta = duration("30s")
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)

    def check(self) -> None:
        if self.worker is not None and self.worker_heartbeat_timeout <= self.worker.heartbeat_interval:
            raise SettingRefused(
                "worker_heartbeat_timeout",
                f"{self.worker_heartbeat_timeout} is out of range; a healthy worker reports only every "
                f"{self.worker.heartbeat_interval} (worker.heartbeat_interval), choose more than that",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreCacheOptions(Section):
    """A cache of table parts on local disk; off while `root_folder` is None."""

    root_folder: str | None = folder()
    max_cache_size_bytes: int | None = integer(16 * _GIB, minimum=1, optional=True)
    """None means no limit."""
    part_size_bytes: int = integer(4 * _MIB, minimum=_KIB)
    cache_on_flush: bool = boolean(False)
    cache_on_compaction: bool = boolean(False)
    preload_disk_cache_on_startup: Preload | None = choice(None, "L0Sst", "AllSst", optional=True)
    """What a writer fetches in the background when it was opened, as far as there is room; readers fetch on demand."""
    scan_interval: timedelta = duration("3600s")
    """How long a process that writes parts may go without measuring what all of them take together."""
    max_open_file_handles: int = integer(1000, minimum=1)
    """Accepted for SlateDB's sake: no file stays open here, so there are never more than threads that read."""

    def check(self) -> None:
        if self.max_cache_size_bytes is not None and self.max_cache_size_bytes < 2 * self.part_size_bytes:
            raise SettingRefused(
                "max_cache_size_bytes",
                f"{self.max_cache_size_bytes} is out of range; choose {2 * self.part_size_bytes} "
                "(2 · part_size_bytes) or more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDirectoryOptions(Section):
    """Collection of one kind of object. Without an `interval` it happens only when asked for."""

    interval: timedelta | None = duration("600s", optional=True)
    min_age: timedelta = duration("300s", minimum="0s")
    dry_run: bool = boolean(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcFenceOptions(Section):
    """Collection of WAL fences. By default it only reports: a fence is what stops a forgotten writer."""

    interval: timedelta | None = duration("600s", optional=True)
    min_age: timedelta = duration("300s", minimum="0s")
    dry_run: bool = boolean(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDetachOptions(Section):
    """Release of the parents whose tables a clone does not use any more."""

    interval: timedelta | None = duration("600s", optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageCollectorOptions(Section):
    """What is collected, how often and how old it must be. None leaves that kind alone."""

    manifest_options: GcDirectoryOptions | None = section(GcDirectoryOptions(), optional=True)
    wal_options: GcDirectoryOptions | None = section(GcDirectoryOptions(), optional=True)
    wal_fence_options: GcFenceOptions | None = section(GcFenceOptions(), optional=True)
    compacted_options: GcDirectoryOptions | None = section(GcDirectoryOptions(), optional=True)
    compactions_options: GcDirectoryOptions | None = section(GcDirectoryOptions(), optional=True)
    detach_options: GcDetachOptions | None = section(GcDetachOptions(), optional=True)
    metric_level: MetricLevel | None = choice(None, *_METRIC_LEVELS, any_case=True, optional=True)
    boundary_files_enabled: bool = boolean(True)
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Section):
    """The settings of a database that is open for writing.

    The last ones are not in SlateDB's settings: it has `sst_block_size`, `filter_bits_per_key`, `block_cache_bytes` and
    `meta_cache_bytes` in its builders, and `max_wal_bytes`, `synchronous_commit` and `on_clock_regression` not at all.
    They are read from the same files; `to_slatedb_json` omits them.
    """

    flush_interval: timedelta | None = duration("100ms", optional=True)
    """How long a write may wait for its WAL object when nobody waits for it; None: until someone flushes."""
    wal_enabled: bool = boolean(True)
    manifest_poll_interval: timedelta = duration("1s")
    manifest_update_timeout: timedelta = duration("300s")
    min_filter_keys: int = integer(1000, maximum=U32_MAX)
    """Tables with fewer rows get no filter."""
    l0_sst_size_bytes: int = integer(64 * _MIB, minimum=1)
    max_wal_flushes_before_l0_flush: int = integer(4096, minimum=1)
    l0_max_ssts: int = integer(8, minimum=1)
    l0_max_ssts_per_key: int = integer(8, minimum=1)
    l0_flush_parallelism: int = integer(4, minimum=1)
    max_unflushed_bytes: int = integer(_GIB, minimum=1)
    """Writers wait while more than this is in memory and not yet in L0."""
    compactor_options: CompactorOptions | None = section(CompactorOptions(), optional=True)
    compression_codec: CodecName | None = choice(None, *CODECS, optional=True)
    object_store_cache_options: ObjectStoreCacheOptions = section(ObjectStoreCacheOptions())
    garbage_collector_options: GarbageCollectorOptions | None = section(
        GarbageCollectorOptions(), optional=True
    )
    metric_level: MetricLevel = choice("Info", *_METRIC_LEVELS, any_case=True)
    default_ttl_millis: int | None = integer(None, maximum=2**63 - 1, optional=True)
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)
    """None: retry for ever."""
    sst_block_size: int = choice(4 * _KIB, *_BLOCK_SIZES, ours=True)
    filter_bits_per_key: int | None = integer(10, minimum=1, maximum=1000, optional=True, ours=True)
    """None: tables have no filters."""
    block_cache_bytes: int = integer(256 * _MIB, ours=True)
    """Memory for data blocks; 0 keeps none."""
    meta_cache_bytes: int = integer(128 * _MIB, ours=True)
    """Memory for table indexes and filters; 0 keeps none."""
    max_wal_bytes: int | None = integer(None, minimum=1, optional=True, ours=True)
    """Rows of that many bytes are written to a WAL file at once, whatever `flush_interval` says; None: no limit."""
    synchronous_commit: bool = boolean(False, ours=True)
    """Whether a write with `await_durable` becomes visible only when it is durable; later writes return after it."""
    on_clock_regression: ClockRegression = choice("refuse", "refuse", "hold", ours=True)
    """What a write does while this machine's clock is behind the newest stored time, as after a clock that ran ahead.

    "refuse" waits up to ten seconds and then raises, as SlateDB does. "hold" writes with the newest stored time until
    the clock has caught up: times never go back, and a TTL counts from that time, so rows live longer by the lag.
    """

    def check(self) -> None:
        if self.max_unflushed_bytes < self.l0_sst_size_bytes:
            raise SettingRefused(
                "max_unflushed_bytes",
                f"{self.max_unflushed_bytes} is out of range; choose {self.l0_sst_size_bytes} "
                "(l0_sst_size_bytes) or more, or writers stop before a table can be flushed",
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings in a JSON object; what it does not mention has its default."""
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """The settings in a .json, .toml, .yaml or .yml file; what it does not mention has its default."""
        try:
            return cls.from_dict(load_file(Path(path)))
        except InvalidRequest as error:
            error.add_note(f"in the settings file {os.fspath(path)}")
            raise

    @classmethod
    def from_env(
        cls,
        prefix: str = ENV_PREFIX,
        base: Self | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """`base` (the defaults) with what the environment changes.

        Names are upper case with a dot between section and field: ``SLATEDB_COMPACTOR_OPTIONS.POLL_INTERVAL=2s``.
        ``null`` stands for None. A name that resembles no setting belongs to somebody else and is ignored; one
        that looks misspelled is refused.
        """
        changes = read_environment(cls, prefix, os.environ if environ is None else environ)
        return cls.from_dict(overlay({} if base is None else base.to_dict(), changes))

    @classmethod
    def load(cls, folder: str | os.PathLike[str] = ".", *, environ: Mapping[str, str] | None = None) -> Self:
        """What SlateDB would load in `folder`: SlateDb.json, .toml, .yaml, .yml, then the environment.

        All files that exist count; a later one wins where two set the same field.
        """
        values: dict[str, Any] = {}
        for name in FILE_NAMES:
            path = Path(folder) / name
            if path.exists():
                values = overlay(values, load_file(path))
        return cls.from_env(base=cls.from_dict(values), environ=environ)

    def to_json(self) -> str:
        """All settings as one JSON object, which `from_json` reads back."""
        return json.dumps(self.to_dict())

    def to_slatedb_json(self) -> str:
        """The part that SlateDB knows, as its own `Settings` reads it."""
        return json.dumps(self.to_dict(slatedb_only=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings(Section):
    """The settings of a reader. A managed checkpoint must outlive two polls, or it could lapse in between.

    With `checkpoint_lifetime` None it never expires. The reader still deletes it when it closes; after a crash it
    stays, and keeps its tables, until an operator deletes it.
    """

    manifest_poll_interval: timedelta = duration("10s")
    checkpoint_lifetime: timedelta | None = duration("600s", minimum="1s", optional=True)
    max_memtable_bytes: int = integer(64 * _MIB, minimum=1)
    skip_wal_replay: bool = boolean(False)
    object_store_cache_options: ObjectStoreCacheOptions = section(ObjectStoreCacheOptions())
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)
    block_cache_bytes: int = integer(256 * _MIB, ours=True)
    meta_cache_bytes: int = integer(128 * _MIB, ours=True)

    def check(self) -> None:
        if (
            self.checkpoint_lifetime is not None
            and self.checkpoint_lifetime < 2 * self.manifest_poll_interval
        ):
            raise SettingRefused(
                "checkpoint_lifetime",
                f"{self.checkpoint_lifetime} is out of range; choose {2 * self.manifest_poll_interval} "
                "(2 · manifest_poll_interval) or more",
            )


def parse_json(text: str) -> dict[str, Any]:
    try:
        return _mapping(json.loads(text))
    except ValueError as error:
        raise InvalidRequest(f"the settings are not JSON: {error}") from None


def load_file(path: Path) -> dict[str, Any]:
    """The mapping in a JSON, TOML or YAML file. An empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidRequest(f"there is no settings file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the settings file {path} cannot be read: {error}") from None
    match path.suffix.lower():
        case ".json":
            return parse_json(text)
        case ".toml":
            try:
                return tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise InvalidRequest(f"the settings are not TOML: {error}") from None
        case ".yaml" | ".yml":
            return _parse_yaml(text)
        case other:
            raise InvalidRequest(f"a settings file ends in .json, .toml, .yaml or .yml, not {other!r}")


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, section by section."""
    merged = dict(below)
    for name, value in above.items():
        held = merged.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        merged[name] = overlay(held, value) if both else value  # type: ignore[arg-type]
    return merged


def read_environment(section: type[Section], prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of the variables that begin with `prefix`, nested as their dots say."""
    found: dict[str, Any] = {}
    # Sorted, so that a variable for a whole section comes before those for its fields.
    for variable in sorted(environ):
        if not variable.startswith(prefix) or variable == prefix:
            continue
        names = variable.removeprefix(prefix).lower().split(".")
        kind = _find_kind(section, names, variable)
        if kind is None:
            continue
        value: Any = kind.of_text(_unquoted(environ[variable]))
        for name in reversed(names):
            value = {name: value}
        found = overlay(found, value)
    return found


def _find_kind(section: type[Section], names: list[str], variable: str) -> Kind | None:
    """The field that the names lead to; None when the first one resembles no field at all."""
    for depth, name in enumerate(names):
        kinds = section.kinds()
        kind = kinds.get(name)
        if kind is None:
            near = suggestion(name, kinds)
            if depth == 0 and not near:
                return None
            hint = "; sections and fields are separated by a dot" if "__" in name else near
            raise SettingRefused(".".join(names[: depth + 1]), f"unknown setting{hint} (from {variable})")
        if depth == len(names) - 1:
            return kind
        inside = nested_section(kind)
        if inside is None:
            raise SettingRefused(".".join(names), f"{name} is not a section (from {variable})")
        section = inside
    return None


def _unquoted(text: str) -> str:
    """SlateDB reads a bare 2 as a number and needs ``"2"`` where a setting is text; both mean the same here."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def _parse_yaml(text: str) -> dict[str, Any]:
    # Imported here: it costs as much as all of this package, and few use it.
    import yaml  # noqa: PLC0415

    try:
        return _mapping(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the settings are not YAML: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"settings are an object of names and values, not {type(value).__name__}")
    return value
