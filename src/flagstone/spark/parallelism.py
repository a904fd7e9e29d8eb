"""How many tasks run at once, which is what work is cut for."""

from __future__ import annotations

from typing import Any, Final

_UNKNOWN: Final = 8


def parallelism(spark: Any) -> int:
    """How many tasks Spark runs at once, where it says so; a session of Spark Connect does not."""
    context = getattr(spark, "_sc", None)
    return _UNKNOWN if context is None else max(1, int(context.defaultParallelism))
