"""The WAL in memory that the tests of the WAL use."""

from __future__ import annotations

from unit.wal.conftest import log, pool

__all__ = ["log", "pool"]
