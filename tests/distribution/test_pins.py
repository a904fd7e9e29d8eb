"""The pinned versions can be installed on every supported version of Python."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def lowest_python() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r">=(\d+\.\d+)", project["requires-python"])
    assert found, "the lowest Python is named as >=MAJOR.MINOR"
    return f"{found[1]}.0"


@pytest.mark.parametrize("name", sorted(PINS))
def test_every_pinned_version_supports_the_lowest_python(name: str) -> None:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip("a marker in pyproject.toml leaves it out here")
    assert distribution.version == PINS[name], "`make setup` installs what is pinned"
    requires = distribution.metadata.get("Requires-Python") or ""
    assert SpecifierSet(requires).contains(lowest_python()), f"{name} {PINS[name]} requires Python {requires}"
