"""The table of planted bugs in docs/simulation.md. `python -m tests.simulation.planted_bugs` writes it."""

from __future__ import annotations

from pathlib import Path

from flagstone.testing.simulation.mutants import MUTANTS
from flagstone.testing.simulation.recorded import FOUND

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
_BEGIN = "<!-- table of planted bugs -->\n"
_END = "<!-- end of table -->"


def table() -> str:
    """Every planted bug with its world, and the simulated time after which it shows."""
    lines = ["| mutant | mistake | seed | found after |", "|---|---|---|---|"]
    for name, found in FOUND.items():
        mutant = MUTANTS[name]
        lines.append(f"| `{name}` | {mutant.mistake} | {found.seed} | {_duration(found.after_s)} |")
    return "\n".join(lines) + "\n"


def _duration(seconds: int) -> str:
    return (
        f"{seconds} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    PAGE.write_text(head + _BEGIN + table() + _END + rest.partition(_END)[2], encoding="utf-8")
