"""Lists words that hide the actor of a sentence, in sources, documents and test names. `make check` runs it.

A line may keep such a word if it is in `ALLOWED`: then the word is the subject itself, such as a quotation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WORDS = re.compile(
    r"\b(nobody|somebody|anybody|whoever|whomever|those who|told|said|dear|the log|log files?)\b",
    re.IGNORECASE,
)
TEST_NAME = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
ALLOWED: frozenset[tuple[str, str]] = frozenset()
"""Pairs of a path and the line's text, stripped."""


def lines() -> Iterator[tuple[str, int, str]]:
    """Every line to check: whole lines of sources and documents, of tests their names, with blanks for underscores."""
    documents = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    for path in sorted([*(ROOT / "src").rglob("*.py"), *documents]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield str(path.relative_to(ROOT)), number, line.strip()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if named := TEST_NAME.match(line):
                yield str(path.relative_to(ROOT)), number, named.group(1).replace("_", " ")


def findings() -> list[str]:
    """One text per line that is not allowed: where it is, the word, and the line."""
    return [
        f"{path}:{number}: {found.group(0)!r} in: {line}"
        for path, number, line in lines()
        if (found := WORDS.search(line)) and (path, line) not in ALLOWED
    ]


if __name__ == "__main__":
    found = findings()
    for finding in found:
        print(finding)
    print(f"{len(found)} lines with words that hide the actor")
    sys.exit(1 if found else 0)
