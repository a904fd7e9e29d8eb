"""What a release consists of: it is built, complete, and works where nothing else of ours is.

Here the wheel is made without compiled kernels, because compiling takes minutes; `make dist` runs the same tests on a
wheel with them and on one without, and installs those with all they depend on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("distribution"),
]

PROJECT = Path(__file__).parents[2]
RELEASE = os.environ.get("FLAGSTONE_DIST")
"""A folder with a real sdist, a wheel for this machine and a wheel for every other."""

REGISTRIES = ("pypi", "pythonhosted", "anaconda")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".*")
PROGRAM = Path(__file__).with_name("wheel_program.py")
SHOP = """
import flagstone, flagstone.spark, pyspark_flagstone
with flagstone.open("shop") as db:
    db.put(b"order/1", b"open", await_durable=True)
"""
PURE = "-py3-none-any.whl"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and the wheel made of it."""
    if RELEASE is not None:
        return Path(RELEASE).absolute()
    pytest.importorskip("build")
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("bench", "docs", "examples", "src", "tests"):
        shutil.copytree(PROJECT / name, checkout / name, ignore=LEFT_BEHIND)
    for file in PROJECT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, checkout)
    made = tmp_path_factory.mktemp("dist")
    # Without isolation nothing is downloaded: what building needs is in this environment.
    # Without --sdist or --wheel the wheel is made of the source distribution, which therefore must be complete.
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", made, cwd=checkout,
        CC="/bin/false",
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def sdist(dist: Path) -> list[str]:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        return [name.partition("/")[2] for name in opened.getnames()]


@pytest.fixture(scope="module", params=["interpreted"] if RELEASE is None else ["interpreted", "compiled"])
def form(request: pytest.FixtureRequest) -> str:
    """The form of the kernels in the wheel under test."""
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(dist: Path, form: str) -> Path:
    """The wheel. Its tag must say whether it fits every machine."""
    (archive,) = (file for file in dist.glob("*.whl") if file.name.endswith(PURE) == (form == "interpreted"))
    return archive


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(opened.read(name).decode())


def test_the_source_distribution_contains_everything_for_building_and_testing(sdist: list[str]) -> None:
    needed = {
        "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "mkdocs.yml",
        "pyproject.toml", "setup.py", "docs/quickstart.md", "docs/images/write-path.svg", "tests/conftest.py",
        "src/flagstone/py.typed", "src/flagstone/kernels/_probe.py", "src/flagstone/kernels/_bytes.pxd",
        "src/pyspark_flagstone/__init__.py",
    }  # fmt: skip

    assert needed <= set(sdist), needed - set(sdist)
    assert [name for name in sdist if name.endswith((".so", ".c", ".pyc"))] == []


def test_the_wheel_contains_both_packages_their_types_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        str(path.relative_to(PROJECT / "src"))
        for pattern in ("*.py", "*.pxd")
        for path in (PROJECT / "src").rglob(pattern)
    }

    assert sources <= set(names) or RELEASE is not None, sources - set(names)
    assert "flagstone/py.typed" in names
    assert "pyspark_flagstone/__init__.py" in names
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "flagstone",
        "pyspark_flagstone",
    }


def test_a_wheel_has_a_library_for_each_kernel_or_none_at_all(wheel: Path, form: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")}
    kernels = set(re.findall(r'^    "(_[a-z_]+)",$', (PROJECT / "setup.py").read_text(), re.MULTILINE))

    assert len(kernels) > 10
    assert libraries == (kernels if form == "compiled" else set())


def test_the_metadata_has_the_fields_that_an_index_shows(metadata: Message) -> None:
    assert metadata["Name"] == "flagstone"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"]
    assert metadata["Author"]
    assert str(metadata.get_payload()).startswith("# Flagstone")
    classifiers = metadata.get_all("Classifier", [])
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(classifiers)
    assert {"spark", "postgres", "dynamodb"} <= set(metadata.get_all("Provides-Extra", []))
    addresses = " ".join([*metadata.get_all("Project-URL", []), str(metadata.get_payload())]).lower()
    assert not [host for host in REGISTRIES if f"//{host}" in addresses or f".{host}" in addresses]


def test_the_wheel_works_in_an_empty_environment(wheel: Path, form: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", empty, cwd=tmp_path)
    python = empty / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    if RELEASE is None:
        run(*pip, "--no-deps", "--no-index", wheel, cwd=tmp_path)
        # What it depends on is borrowed from here. Only the folder is: our own editable installation is not in it.
        (site,) = empty.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    else:
        run(*pip, "-c", PROJECT / "constraints.txt", f"{wheel}[spark]", cwd=tmp_path)

    said = run(python, PROGRAM, f"--{form}", cwd=tmp_path, PYTHONPATH="")
    run(python, "-c", SHOP, cwd=tmp_path, PYTHONPATH="")

    assert f"kernels {form}: {empty}" in said
    assert run(empty / "bin/flagstone", "--version", cwd=tmp_path).startswith("flagstone ")
    assert "order/1\topen" in run(empty / "bin/flagstone", "--path", "shop", "scan", cwd=tmp_path)
