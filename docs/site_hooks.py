# ruff: noqa: INP001 - no package: mkdocs loads it
"""What the site has besides the pages in this folder: the measurements, from where they are written.

Decision records and measurements enter the navigation by themselves, so that a new one needs no second entry.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "bench/results"
MEASUREMENTS = "measurements/"

_INTO_DOCS = re.compile(r"\]\((?:\.\./)+docs/")
_OUT_OF_THE_SITE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    sections: dict[str, list[Any]] = {
        name: entry for part in config.nav or [] for name, entry in part.items() if isinstance(entry, list)
    }
    records = [f"adr/{path.name}" for path in sorted((PROJECT / "docs/adr").glob("[0-9]*.md"))]
    sections["Project"][-1]["Decisions"] = ["adr/README.md", *records]
    sections["Project"].append({"Measurements": [MEASUREMENTS + path.name for path in _results("*.md")]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results of the benchmarks, with their charts."""
    for path in (*_results("*.md"), *_results("*.svg"), *_results("*.png")):
        files.append(File.generated(config, MEASUREMENTS + path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Results are written for their place in the repository: links from there to what the site lacks become text."""
    if not page.file.src_uri.startswith(MEASUREMENTS):
        return markdown
    inside = _INTO_DOCS.sub("](__docs__/", markdown)
    return _OUT_OF_THE_SITE.sub(r"\1", inside).replace("](__docs__/", "](../")


def _results(pattern: str) -> list[Path]:
    return sorted(RESULTS.glob(pattern))
