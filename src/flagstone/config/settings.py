"""All settings, with SlateDB's names and defaults: a SlateDb.toml that SlateDB reads works here.

A duration is a `timedelta` or a text such as ``"100ms"``, which becomes a `timedelta`. A section may be given as a
mapping. None switches a feature off. Settings are immutable values that compare, hash and pickle; `replace` makes a
changed copy.
"""

# ruff: noqa: RUF009 - the functions called in the class bodies make dataclass fields
from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from flagstone.config.fields import (
    U32_MAX,
    DurationField,
    Kind,
    OptionalDuration,
    OptionalSection,
    Section,
    SectionField,
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
PriceListName = Literal["s3-standard", "s3-express", "gcs-standard", "r2-standard", "free"]
ClockRegression = Literal["refuse", "hold"]
CompactionPolicy = Literal["size-tiered", "lazy-leveling"]

PRICE_LIST_NAMES: Final = ("s3-standard", "s3-express", "gcs-standard", "r2-standard", "free")
COMPACTION_POLICIES: Final = ("size-tiered", "lazy-leveling")
CODECS: Final = ("Snappy", "Zlib", "Lz4", "Zstd")
ENV_PREFIX: Final = "SLATEDB_"

FILE_NAMES: Final = ("SlateDb.json", "SlateDb.toml", "SlateDb.yaml", "SlateDb.yml")
"""The files that `Settings.load` reads, in this order; a later file wins."""

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_GIB: Final = 1024 * _MIB
_BLOCK_SIZES: Final = tuple(_KIB << shift for shift in range(7))
_METRIC_LEVELS: Final = ("Debug", "Info")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions(Section):
    """The compaction policy: which SSTs and sorted runs are merged, and when.

    SlateDB has a mapping of texts here, empty by default; so do `to_dict` and the settings files. It ignores names that
    it does not know: the last five are not SlateDB's, and a file with them works there, too, with its own policy.
    """

    min_compaction_sources: int = integer(4, minimum=1)
    max_compaction_sources: int = integer(8, minimum=1)
    include_size_threshold: float = number(4.0, minimum=1.0)
    compaction_policy: CompactionPolicy = choice("size-tiered", *COMPACTION_POLICIES, ours=True)
    """"size-tiered" is SlateDB's choice. "lazy-leveling" keeps one run below, into which the runs above are merged."""
    last_run_ratio: float = number(4.0, minimum=1.0, ours=True)
    """With "lazy-leveling": runs are merged into the last one when it is at most this many times as large as they."""
    max_upper_runs: int = integer(8, minimum=1, ours=True)
    """With "lazy-leveling": the most runs above the last one."""
    space_driven: bool = boolean(False, ours=True)
    """With "size-tiered": rewrite runs with many dead rows if nothing else is due. Lazy leveling always does."""
    min_dead_share: float = number(0.5, minimum=0.01, ours=True)
    """The share of dead bytes from which runs are rewritten for their space."""

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
        # `dataclass(slots=True)` creates a second class, for which super() without arguments fails.
        return super(SchedulerOptions, cls).from_dict(read)

    def to_dict(self, *, slatedb_only: bool = False) -> dict[str, Any]:
        plain = super(SchedulerOptions, self).to_dict(slatedb_only=slatedb_only)
        return {
            entry.name: _text_of(plain[entry.name])
            for entry in fields(self)
            if entry.name in plain and getattr(self, entry.name) != entry.default
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionWorkerOptions(Section):
    """How one process executes compaction jobs."""

    max_concurrent_compactions: int = integer(4, minimum=1)
    compactions_poll_interval: DurationField = duration("5s")
    heartbeat_interval: DurationField = duration("10s")
    max_sst_size: int = integer(256 * _MIB, minimum=1)
    max_fetch_tasks: int = integer(4, minimum=1)
    bytes_to_fetch: int = integer(2 * _MIB, minimum=1)
    max_subcompactions: int = integer(4, minimum=1)
    min_filter_keys: int = integer(1000, maximum=U32_MAX)
    """Only for a worker in its own process; a worker inside a writer uses the writer's setting."""
    compression_codec: CodecName | None = choice(None, *CODECS, optional=True)
    """Only for a worker in its own process, like `min_filter_keys`."""
    metric_level: MetricLevel | None = choice(None, *_METRIC_LEVELS, any_case=True, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactorOptions(Section):
    """How the compactor schedules and commits compactions. Without a `worker`, other processes execute the jobs."""

    poll_interval: DurationField = duration("5s")
    """How often the compactor reads the newest manifest and jobs. In an idle writer it is three times as long."""
    manifest_update_timeout: DurationField = duration("300s")
    max_concurrent_compactions: int = integer(4, minimum=1)
    enable_trivial_move: bool = boolean(False)
    scheduler_options: SectionField[SchedulerOptions] = section(SchedulerOptions())
    worker: OptionalSection[CompactionWorkerOptions] = section(CompactionWorkerOptions(), optional=True)
    metric_level: MetricLevel | None = choice(None, *_METRIC_LEVELS, any_case=True, optional=True)
    commit_compacted_interval: DurationField = duration("1s")
    """The poll interval while workers in other processes have jobs."""
    checkpoint_lifetime: DurationField = duration("900s", minimum="1s")
    """How long readers may still use SSTs that a compaction has replaced."""
    worker_heartbeat_timeout: DurationField = duration("30s")
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)

    def check(self) -> None:
        if self.worker is not None and self.worker_heartbeat_timeout <= self.worker.heartbeat_interval:
            raise SettingRefused(
                "worker_heartbeat_timeout",
                f"{self.worker_heartbeat_timeout} is out of range; choose more than "
                f"{self.worker.heartbeat_interval} (worker.heartbeat_interval)",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreCacheOptions(Section):
    """A cache of SST parts on local disk; off if `root_folder` is None."""

    root_folder: str | None = folder()
    max_cache_size_bytes: int | None = integer(16 * _GIB, minimum=1, optional=True)
    """None means no limit."""
    part_size_bytes: int = integer(4 * _MIB, minimum=_KIB)
    cache_on_flush: bool = boolean(False)
    cache_on_compaction: bool = boolean(False)
    preload_disk_cache_on_startup: Preload | None = choice(None, "L0Sst", "AllSst", optional=True)
    """What a writer fetches in the background after it opens, while there is room. Readers fetch on demand."""
    scan_interval: DurationField = duration("3600s")
    """How often a process that writes parts measures the size of the whole cache."""
    max_open_file_handles: int = integer(1000, minimum=1)
    """Accepted for compatibility with SlateDB, without effect: files are open only during a read."""

    def check(self) -> None:
        if self.max_cache_size_bytes is not None and self.max_cache_size_bytes < 2 * self.part_size_bytes:
            raise SettingRefused(
                "max_cache_size_bytes",
                f"{self.max_cache_size_bytes} is out of range; choose {2 * self.part_size_bytes} "
                "(2 · part_size_bytes) or more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDirectoryOptions(Section):
    """Garbage collection of one kind of object. Without an `interval` it runs only on request."""

    interval: OptionalDuration = duration("600s", optional=True)
    min_age: DurationField = duration("300s", minimum="0s")
    dry_run: bool = boolean(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcFenceOptions(Section):
    """Garbage collection of WAL fences. By default it only reports: a fence stops a writer that is still running."""

    interval: OptionalDuration = duration("600s", optional=True)
    min_age: DurationField = duration("300s", minimum="0s")
    dry_run: bool = boolean(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDetachOptions(Section):
    """Release of lenders whose SSTs a clone no longer uses."""

    interval: OptionalDuration = duration("600s", optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageCollectorOptions(Section):
    """What the garbage collector deletes, how often, and at which age. None: that kind is not collected."""

    manifest_options: OptionalSection[GcDirectoryOptions] = section(GcDirectoryOptions(), optional=True)
    wal_options: OptionalSection[GcDirectoryOptions] = section(GcDirectoryOptions(), optional=True)
    wal_fence_options: OptionalSection[GcFenceOptions] = section(GcFenceOptions(), optional=True)
    compacted_options: OptionalSection[GcDirectoryOptions] = section(GcDirectoryOptions(), optional=True)
    compactions_options: OptionalSection[GcDirectoryOptions] = section(GcDirectoryOptions(), optional=True)
    detach_options: OptionalSection[GcDetachOptions] = section(GcDetachOptions(), optional=True)
    metric_level: MetricLevel | None = choice(None, *_METRIC_LEVELS, any_case=True, optional=True)
    boundary_files_enabled: bool = boolean(True)
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Section):
    """The settings of a database that is open for writing.

    The last ten are not in SlateDB's settings. SlateDB has `sst_block_size`, `filter_bits_per_key`,
    `block_cache_bytes` and `meta_cache_bytes` in its builders, and does not have the others. They are read from the
    same files; `to_slatedb_json` omits them.
    """

    flush_interval: OptionalDuration = duration("100ms", optional=True)
    """How long a write without `await_durable` may wait for its WAL file. None: until a caller flushes."""
    wal_enabled: bool = boolean(True)
    manifest_poll_interval: DurationField = duration("1s")
    manifest_update_timeout: DurationField = duration("300s")
    min_filter_keys: int = integer(1000, maximum=U32_MAX)
    """SSTs with fewer rows get no filter."""
    l0_sst_size_bytes: int = integer(64 * _MIB, minimum=1)
    max_wal_flushes_before_l0_flush: int = integer(4096, minimum=1)
    l0_max_ssts: int = integer(8, minimum=1)
    l0_max_ssts_per_key: int = integer(8, minimum=1)
    l0_flush_parallelism: int = integer(4, minimum=1)
    max_unflushed_bytes: int = integer(_GIB, minimum=1)
    """Writes wait while more than this is in memory and not yet in L0."""
    compactor_options: OptionalSection[CompactorOptions] = section(CompactorOptions(), optional=True)
    compression_codec: CodecName | None = choice(None, *CODECS, optional=True)
    object_store_cache_options: SectionField[ObjectStoreCacheOptions] = section(ObjectStoreCacheOptions())
    garbage_collector_options: OptionalSection[GarbageCollectorOptions] = section(
        GarbageCollectorOptions(), optional=True
    )
    metric_level: MetricLevel = choice("Info", *_METRIC_LEVELS, any_case=True)
    default_ttl_millis: int | None = integer(None, maximum=2**63 - 1, optional=True)
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)
    """None: retry for ever."""
    sst_block_size: int = choice(4 * _KIB, *_BLOCK_SIZES, ours=True)
    filter_bits_per_key: int | None = integer(10, minimum=1, maximum=1000, optional=True, ours=True)
    """None: SSTs have no filters."""
    block_cache_bytes: int = integer(256 * _MIB, ours=True)
    """Memory for data blocks; 0: no cache."""
    meta_cache_bytes: int = integer(128 * _MIB, ours=True)
    """Memory for SST indexes and filters; 0: no cache."""
    max_wal_bytes: int | None = integer(None, minimum=1, optional=True, ours=True)
    """When unwritten rows reach this size, a WAL file is written before `flush_interval` is over. None: no limit."""
    max_parallel_wal_writes: int = integer(1, minimum=1, maximum=64, ours=True)
    """How many WAL files may be under way at once. Above 1, only Flagstone may open the database after a crash."""
    wal_hedge_after: OptionalDuration = duration(None, optional=True, ours=True)
    """After this time a second request for a WAL file is sent, and the first success counts. None: no second one."""
    synchronous_commit: bool = boolean(False, ours=True)
    """Whether a write with `await_durable` becomes visible only when it is durable. Later writes return after it."""
    on_clock_regression: ClockRegression = choice("refuse", "refuse", "hold", ours=True)
    """What a write does while this machine's clock is behind the newest stored time.

    "refuse" waits up to ten seconds and then raises, as SlateDB does. "hold" uses the newest stored time until the
    clock has reached it. A TTL counts from that time, so rows live longer by the lag.
    """
    memory_budget: int | None = integer(None, minimum=64 * _MIB, optional=True, ours=True)
    """Memory that databases and readers of this process share: memtables, caches, read-ahead, flushes, compactions.

    Other limits are lowered to fit, and all these databases have one cache. None: each database has its own limits.
    """
    price_list: PriceListName = choice("s3-standard", *PRICE_LIST_NAMES, ours=True)
    """The prices of the dollars in `status()["cost"]`."""

    def check(self) -> None:
        if self.max_unflushed_bytes < self.l0_sst_size_bytes:
            raise SettingRefused(
                "max_unflushed_bytes",
                f"{self.max_unflushed_bytes} is out of range; choose {self.l0_sst_size_bytes} "
                "(l0_sst_size_bytes) or more, or writes stop before an SST can be flushed",
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings in a JSON object; settings that it lacks have their defaults."""
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """The settings in a .json, .toml, .yaml or .yml file; settings that it lacks have their defaults."""
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
        """`base` (the defaults if None) with the settings of the environment.

        Names are upper case with a dot between section and field: ``SLATEDB_COMPACTOR_OPTIONS.POLL_INTERVAL=2s``.
        ``null`` stands for None. A name that is similar to a setting is an error; other names are ignored.
        """
        changes = read_environment(cls, prefix, os.environ if environ is None else environ)
        return cls.from_dict(overlay({} if base is None else base.to_dict(), changes))

    @classmethod
    def load(cls, folder: str | os.PathLike[str] = ".", *, environ: Mapping[str, str] | None = None) -> Self:
        """The settings that SlateDB loads in `folder`: from SlateDb.json, .toml, .yaml, .yml, then the environment.

        If two of them set the same field, the later one wins.
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
        """The settings that SlateDB has, as JSON for its own `Settings`."""
        return json.dumps(self.to_dict(slatedb_only=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings(Section):
    """The settings of a reader. A reader checkpoint must outlive two polls, or it could expire between them.

    With `checkpoint_lifetime` None it never expires. The reader deletes it when it closes. After a crash it stays, and
    keeps its SSTs, until an operator deletes it.
    """

    manifest_poll_interval: DurationField = duration("10s")
    checkpoint_lifetime: OptionalDuration = duration("600s", minimum="1s", optional=True)
    max_memtable_bytes: int = integer(64 * _MIB, minimum=1)
    skip_wal_replay: bool = boolean(False)
    object_store_cache_options: SectionField[ObjectStoreCacheOptions] = section(ObjectStoreCacheOptions())
    object_store_max_retries: int | None = integer(None, maximum=U32_MAX, optional=True)
    block_cache_bytes: int = integer(256 * _MIB, ours=True)
    meta_cache_bytes: int = integer(128 * _MIB, ours=True)
    memory_budget: int | None = integer(None, minimum=64 * _MIB, optional=True, ours=True)
    """The budget of `Settings.memory_budget`. None: the reader has a cache of its own."""
    price_list: PriceListName = choice("s3-standard", *PRICE_LIST_NAMES, ours=True)
    """The prices of the dollars in `status()["cost"]`."""

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
        raise InvalidRequest(f"there is no settings file {path}; check the path") from None
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
    """The kind of the field with these names; None if the first name is not similar to any field."""
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


def _text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unquoted(text: str) -> str:
    """The text without quotes. SlateDB reads 2 as a number and needs ``"2"`` for text; here both mean the same."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def _parse_yaml(text: str) -> dict[str, Any]:
    # Imported here, because the import takes as long as that of this whole package.
    import yaml  # noqa: PLC0415

    try:
        return _mapping(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the settings are not YAML: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"settings are an object of names and values, not {type(value).__name__}")
    return value
