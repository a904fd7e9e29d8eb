"""The tables of the documentation agree with the code."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import flagstone
from docs.code_blocks import PROJECT
from flagstone import config
from flagstone.runtime import metric_names

DOCS = PROJECT / "docs"
ROW = re.compile(r"^\| `(?P<name>[a-z0-9_]+)` \| `(?P<default>[^`]*)` \|", re.MULTILINE)
SECTIONS = {
    "Writer": config.Settings(),
    "Compaction: `compactor_options`": config.CompactorOptions(),
    "Garbage: `garbage_collector_options`": config.GcDirectoryOptions(),
    "Disk cache: `object_store_cache_options`": config.ObjectStoreCacheOptions(),
    "Readers: `ReaderSettings`": config.ReaderSettings(),
}
WORKER = "`compactor_options.worker`; `null`"
POLICY = "`compactor_options.scheduler_options`, as text"


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def plain_fields(section: Any) -> dict[str, str]:
    """The fields that are not sections, with their defaults as written in a settings file."""
    values = section.to_dict()
    return {name: written(value) for name, value in values.items() if not (isinstance(value, dict) and value)}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_setting_is_listed_with_its_default(title: str) -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    part, _, worker = part.partition(WORKER)
    part, _, policy = part.partition(POLICY)

    assert dict(ROW.findall(part)) == plain_fields(SECTIONS[title])
    if policy:
        # `to_dict` omits the defaults of this section.
        options = config.SchedulerOptions()
        defaults = {name: written(getattr(options, name)) for name in options.kinds()}
        assert dict(ROW.findall(policy)) == defaults
    if worker:
        assert dict(ROW.findall(worker)) == plain_fields(config.CompactionWorkerOptions())


def test_every_metric_in_the_documentation_is_counted() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:slatedb|flagstone)\.[a-z_]+\.[a-z_]+)[`{]", text))
    sources = [path for path in (PROJECT / "src").rglob("*.py") if path.name != "metric_names.py"]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    constants = {value: name for name, value in vars(metric_names).items() if isinstance(value, str)}
    loggers = set(re.findall(r'getLogger\("([a-z.]+)"\)', code))

    counted = {name for name in named if f'"{name}"' in code or f".{constants.get(name, '?')}" in code}
    assert named - counted - loggers == set()
    assert len(named) > 15


def test_every_kind_of_error_has_its_section() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    kinds = {
        name for name in flagstone.__all__ if issubclass(type(getattr(flagstone, name)), type)
        and issubclass(getattr(flagstone, name), flagstone.FlagstoneError)
    } - {"FlagstoneError"}  # fmt: skip

    assert {kind for kind in kinds if f"\n## {kind}\n" in text} == kinds
    assert len(kinds) == 6


def test_every_command_is_described() -> None:
    from typer.main import get_command

    from flagstone.cli.main import app

    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    commands = set(getattr(get_command(app), "commands", {}))

    assert {name for name in commands if not re.search(rf"`{name}\b", text)} == set()


def test_every_image_is_shown_and_every_shown_image_exists() -> None:
    pages = [PROJECT / "README.md", *DOCS.rglob("*.md")]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in target
    }
    kept = {path.resolve() for path in (DOCS / "images").iterdir()}

    assert [str(path) for path in shown if not path.exists()] == []
    assert kept - shown == set()


def test_images_refer_to_no_other_file() -> None:
    for image in (DOCS / "images").glob("*.svg"):
        text = image.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http" not in text, image.name
        assert "aria-label=" in text, f"{image.name} has no text for screen readers"
