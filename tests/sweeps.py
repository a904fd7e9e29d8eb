"""Which store calls of an operation a fault sweep strikes.

`make test` strikes every fourth call, beginning at another one in each run; `make faults` strikes all of them.
"""

from __future__ import annotations

import os
import random

STRIDE = int(os.environ.get("SWEEP_STRIDE", "4"))


def struck_calls(calls: int, *, stride: int = 1) -> range:
    """The numbers of the calls to strike among the first `calls`; a `stride` makes them as much rarer still."""
    step = STRIDE * stride
    return range(1 + random.randrange(min(step, calls)), calls + 1, step)
