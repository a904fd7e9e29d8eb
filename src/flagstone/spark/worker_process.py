"""The Python process in which Spark runs tasks and plans reads."""

from __future__ import annotations

import gc
import sys
from functools import cache
from typing import Final

_DAEMON: Final = "pyspark.daemon"


@cache
def settle() -> None:
    """Leave all that exists by now out of garbage collections, once per worker process of Spark.

    The daemon that starts these processes collects garbage after every task and every plan. Without this each
    collection walks through all modules: 30 ms, a fifth of the processor time of a short task. In other processes,
    such as the user's driver, this does nothing.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name == _DAEMON:
        gc.collect()
        gc.freeze()
