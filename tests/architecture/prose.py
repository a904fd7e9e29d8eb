"""Lists words that hide the actor of a sentence, and words that the glossary has replaced. `make check` runs it.

It reads whole lines of sources, documents, examples and benchmarks, code included, and of tests the names. A line may
keep such a word if it is in `ALLOWED`, because the word has another meaning there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HIDES_THE_ACTOR = (
    r"nobody|somebody|anybody|everybody|whoever|whomever|who|whom|those who",
    r"told|said|dear|dearer|dearly|anew|in vain|whence|thence|lest",
)
"""Name the process, the class or the caller instead; say "again", "expensive"."""
REPLACED = (
    r"the log|log files?|log pins?|read pins?|hand-?overs?",
    r"L0 tables?|tables? of L0|tables? in L0",
)
"""The glossary says WAL, WAL file, retention and scan checkpoint, load request, SST, sequence number."""
WORDS = re.compile(rf"\b(?:{'|'.join((*HIDES_THE_ACTOR, *REPLACED))})\b", re.IGNORECASE)
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "bench/**/*.md",
    ".github/**/*.md",
    ".github/**/*.yml",
)
SOURCES = (
    "src/**/*.py",
    "examples/**/*.py",
    "bench/**/*.py",
    "docs/*.py",
    "setup.py",
    "Makefile",
    "mkdocs.yml",
)
TEST_NAME = re.compile(r"\s*(?:async )?def (test_\w+)")
ALLOWED: frozenset[tuple[str, str]] = frozenset(
    {
        (
            "docs/adr/0009-reads-hide-expired-rows.md",
            "- *Expiry decided by sequence or by compaction time*: not visible to the user who set the time.",
        ),
        (
            "bench/charts.py",
            '"""A shape for each colour, for readers who cannot distinguish the colours."""',
        ),
    }
)
"""Pairs of a path and the line's text, stripped."""


def lines() -> Iterator[tuple[str, int, str]]:
    """Every line to check with its path and number; of tests their names, with blanks for underscores."""
    for path in sorted({path for pattern in (*DOCUMENTS, *SOURCES) for path in ROOT.glob(pattern)}):
        for number, line in _lines_of(path):
            yield _named(path), number, line.strip()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in _lines_of(path):
            if found := TEST_NAME.match(line):
                yield _named(path), number, found.group(1).replace("_", " ")


def _lines_of(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def _named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def findings() -> list[str]:
    """A text for each line that is not allowed, and for each exception whose line is gone."""
    kept, found = set(), []
    for path, number, line in lines():
        if (path, line) in ALLOWED:
            kept.add((path, line))
        elif word := WORDS.search(line):
            found.append(f"{path}:{number}: {word.group(0)!r} in: {line}")
    return found + [f"{path}: remove the exception for: {line}" for path, line in sorted(ALLOWED - kept)]


if __name__ == "__main__":
    found = findings()
    for finding in found:
        print(finding)
    print(f"{len(found)} lines with words that hide the actor, or that are not in the glossary")
    sys.exit(1 if found else 0)
