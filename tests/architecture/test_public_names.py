"""What users may import: every name sorted, documented, and of a type that their checkers understand."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(sys.executable).parent
PUBLIC = (
    "flagstone",
    "flagstone.aio",
    "flagstone.compaction",
    "flagstone.config",
    "flagstone.cost",
    "flagstone.keys",
    "flagstone.operators",
    "flagstone.spark",
    "flagstone.telemetry",
    "flagstone.values",
)


@pytest.fixture(params=PUBLIC)
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "flagstone.spark":
        pytest.importorskip("pyspark")
    return importlib.import_module(request.param)


def test_public_names_are_sorted_unique_and_defined(module: ModuleType) -> None:
    names = list(module.__all__)

    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []
    assert module.__doc__


def test_every_public_name_and_its_methods_have_a_docstring(module: ModuleType) -> None:
    found = {name: getattr(module, name) for name in module.__all__}
    things = {
        name: thing for name, thing in found.items() if inspect.isclass(thing) or inspect.isfunction(thing)
    }

    undocumented = [name for name, thing in things.items() if not inspect.getdoc(thing)]
    undocumented += [
        f"{name}.{method}"
        for name, thing in things.items()
        if inspect.isclass(thing)
        for method in undocumented_methods(thing)
    ]
    assert undocumented == []


def undocumented_methods(of: type) -> Iterator[str]:
    for name, member in inspect.getmembers(of):
        called = member.fget if isinstance(member, property) else member
        ours = str(getattr(called, "__module__", None)).startswith("flagstone.")
        if not name.startswith("_") and callable(called) and ours and not inspect.getdoc(member):
            yield name


@pytest.mark.long
@pytest.mark.slow
def test_every_public_type_is_known_to_type_checkers() -> None:
    pytest.importorskip("pyright")
    # It finds the package through the first Python on the path.
    done = subprocess.run(
        [SCRIPTS / "pyright", "--verifytypes", "flagstone", "--ignoreexternal", "--outputjson"],
        env={**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    report = json.loads(done.stdout)["typeCompleteness"]
    unknown = [
        f"{symbol['name']}: {finding['message']}"
        for symbol in report["symbols"]
        for finding in symbol["diagnostics"]
        if not symbol["isTypeKnown"]
    ]

    assert unknown == []
    assert report["completenessScore"] == 1
    assert report["exportedSymbolCounts"]["withKnownType"] > 4000
