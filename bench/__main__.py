"""`python -m bench [NAME …]` runs the named comparisons, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import compaction, engine, kernels, requests

COMPARISONS: dict[str, Callable[[], str]] = {
    "kernels": kernels.run,
    "engine": engine.run,
    "requests": requests.run,
    "compaction": compaction.run,
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(COMPARISONS)
    unknown = [name for name in chosen if name not in COMPARISONS]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(COMPARISONS)}")
    for name in chosen:
        print(COMPARISONS[name]())
