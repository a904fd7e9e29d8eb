"""The pinned versions can be installed and built with on every supported Python, and those are the ones we publish."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def lowest_python() -> str:
    found = re.fullmatch(r">=(\d+\.\d+)", PYPROJECT["project"]["requires-python"])
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


@pytest.mark.parametrize("requirement", PYPROJECT["build-system"]["requires"])
def test_a_build_needs_a_range_of_versions_that_has_the_pinned_one(requirement: str) -> None:
    needed = Requirement(requirement)
    pins = {name.lower(): version for name, version in PINS.items()}

    assert "==" not in requirement, "a distribution must be able to build with what it has"
    assert needed.specifier.contains(pins[needed.name.lower()])


def test_wheels_are_built_for_every_python_that_is_tested_and_announced() -> None:
    versions = [
        line.rpartition(" ")[2]
        for line in PYPROJECT["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    ]
    wheels = PYPROJECT["tool"]["cibuildwheel"]

    assert wheels["build"] == [f"cp{version.replace('.', '')}-*" for version in versions]
    assert versions[0] == lowest_python().removesuffix(".0")
    workflow = ROOT / ".github/workflows/test.yml"
    if workflow.exists():  # a source distribution has no workflows
        tested = yaml.safe_load(workflow.read_text())["jobs"]["test"]["strategy"]["matrix"]["python"]
        assert tested == versions


@pytest.mark.parametrize(
    ("build", "skipped"),
    [
        ("cp311-manylinux_x86_64", False),
        ("cp314-musllinux_aarch64", False),
        ("cp313-macosx_arm64", False),
        ("cp314t-manylinux_x86_64", True),
        ("cp313t-macosx_arm64", True),
        ("cp312-win_amd64", True),
        ("cp312-musllinux_i686", True),
    ],
)
def test_no_wheel_is_built_where_kernels_are_wrong_or_dependencies_are_missing(
    build: str, skipped: bool
) -> None:
    patterns = PYPROJECT["tool"]["cibuildwheel"]["skip"]

    assert any(fnmatch(build, pattern) for pattern in patterns) == skipped
