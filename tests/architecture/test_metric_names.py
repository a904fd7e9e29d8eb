"""Every listed metric is counted, and every counted metric is listed."""

from __future__ import annotations

import ast
from pathlib import Path

import flagstone
from flagstone.runtime import metric_names
from flagstone.runtime.metric_help import HELP

SOURCE = Path(flagstone.__file__).parent
LISTS = ("metric_names.py", "metric_help.py")
MODULES = [path for path in SOURCE.rglob("*.py") if path.name not in LISTS]
LISTED = metric_names.SLATEDB_NAMES | metric_names.FLAGSTONE_NAMES
NOT_POSSIBLE = {metric_names.DB_CACHE_ERROR_COUNT}
"""The cache is a dictionary in memory: no access fails. The wheel lists this metric from the start, so we do."""


def constants() -> dict[str, str]:
    return {
        name: value
        for name, value in vars(metric_names).items()
        if isinstance(value, str) and value in LISTED
    }


def test_code_that_counts_uses_every_listed_name() -> None:
    used: set[str] = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Name):
                used.add(node.id)
    unused = {value for name, value in constants().items() if name not in used}
    assert unused == NOT_POSSIBLE
    assert len(LISTED) > 70


def test_every_instrument_is_made_with_a_listed_name() -> None:
    literal = [
        f"{module.relative_to(SOURCE)}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("counter", "gauge", "histogram")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    assert literal == []


def test_every_listed_metric_has_a_help_sentence_and_no_other() -> None:
    assert HELP.keys() == LISTED
    assert all(text.endswith(".") and "\n" not in text for text in HELP.values())
