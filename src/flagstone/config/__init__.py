"""The settings of databases and readers, and durations written as text."""

from __future__ import annotations

from flagstone.config.durations import as_duration, format_duration, parse_duration
from flagstone.config.settings import (
    CODECS,
    CodecName,
    CompactionWorkerOptions,
    CompactorOptions,
    GarbageCollectorOptions,
    GcDetachOptions,
    GcDirectoryOptions,
    GcFenceOptions,
    MetricLevel,
    ObjectStoreCacheOptions,
    Preload,
    ReaderSettings,
    SchedulerOptions,
    Settings,
)

__all__ = [
    "CODECS",
    "CodecName",
    "CompactionWorkerOptions",
    "CompactorOptions",
    "GarbageCollectorOptions",
    "GcDetachOptions",
    "GcDirectoryOptions",
    "GcFenceOptions",
    "MetricLevel",
    "ObjectStoreCacheOptions",
    "Preload",
    "ReaderSettings",
    "SchedulerOptions",
    "Settings",
    "as_duration",
    "format_duration",
    "parse_duration",
]
