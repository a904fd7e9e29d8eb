"""`python -m bench compare OLD NEW`: Flagstone's figures of two commits, or of two folders with results, side by side.

The results of a commit are those it has in `bench/results`. Only figures that both have are compared. Figures from
different machines are compared, too, with a warning.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import FLAGSTONE, RESULTS, Better, formatted, markdown_table

ROOT = RESULTS.parents[1]


class Figure(NamedTuple):
    """One figure of Flagstone's."""

    value: float
    unit: str
    better: Better


def compare(old: str, new: str) -> str:
    """A table of every figure that both have: the old one, the new one, and how many times better the new one is."""
    before, after = load(old), load(new)
    rows = []
    for name in sorted(before.keys() & after.keys()):
        earlier, later = dict(figures(before[name])), dict(figures(after[name]))
        for what, figure in later.items():
            former = earlier.get(what)
            if former is not None and former.value and figure.value:
                ratio = (
                    figure.value / former.value if figure.better == "higher" else former.value / figure.value
                )
                values = [formatted(one.value, one.unit) for one in (former, figure)]
                rows.append([name, what, *values, f"{ratio:.2f}×"])
    machines = {_machine(result) for results in (before, after) for result in results.values()}
    warning = (
        ["", "The figures come from different machines or Python versions."] if len(machines) > 1 else []
    )
    return "\n".join([*markdown_table(["result", "what", old, new, "times better"], rows), *warning])


def figures(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Flagstone's figures of one result: its measurements, and the points of its curves."""
    for one in result["measurements"]:
        if FLAGSTONE in one["values"]:
            yield one["what"], Figure(one["values"][FLAGSTONE], one["unit"], one["better"])
    for curve in result["curves"]:
        for size, value in curve["points"].get(FLAGSTONE, []):
            yield f"{curve['title']}, {size:,g}", Figure(value, curve["unit"], curve["better"])


def load(source: str) -> dict[str, dict[str, Any]]:
    """Results by name, from a folder if there is one of that name, otherwise from a commit."""
    folder = Path(source)
    if folder.is_dir():
        texts = [path.read_text() for path in folder.glob("*.json")]
    else:
        inside = RESULTS.relative_to(ROOT)
        listed = _git("ls-tree", "--name-only", source, f"{inside}/").splitlines()
        texts = [_git("show", f"{source}:{path}") for path in listed if path.endswith(".json")]
    results = [json.loads(text) for text in texts]
    if not results:
        raise SystemExit(f"no results in {source!r}: name a folder, or a commit with {RESULTS.name}/*.json")
    return {result["name"]: result for result in results}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _machine(result: dict[str, Any]) -> tuple[Any, ...]:
    facts = result["machine"]
    return facts["processor"], facts["cores"], facts["python"], facts["kernels"]
