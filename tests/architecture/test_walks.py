"""The layers and the walks of docs/architecture.md: the page cannot differ from the code.

A walk lists files in the order in which data passes through them. Two tests keep it true:

- An earlier file of the walk imports each file, directly or by a name that its package re-exports. If none does, the
  line says "Reached through `FILE`", and one import connects the two. FILE is the interface that the file implements or
  the format that two processes share, and the file imports it; or FILE holds its objects and imports the file. An
  earlier file of the walk imports FILE, or is FILE.
- A traced operation enters the files in this order. It may enter others in between. Compiled kernels leave no trace.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import flagstone
from flagstone import Settings

SOURCE = Path(flagstone.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
WALKS = (
    "put, until it is durable",
    "get, with nothing in memory",
    "scan",
    "bulk load, beside a running writer",
    "change read",
)
_ITEM = re.compile(r"^(\d+)\. `([\w/]+\.py)`: (.*?)(?=^\d+\. |^\s*$)", re.MULTILINE | re.DOTALL)
_THROUGH = re.compile(r"Reached through\s+`([\w/]+\.py)`")


class Stop(NamedTuple):
    """One line of a walk: a file, and the file through which data reaches it if no earlier one imports it."""

    file: str
    through: str | None


def walk(name: str) -> list[Stop]:
    """The stops of the walk under that heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"### {name}\n")[1].split("\n##")[0]
    items = _ITEM.findall(section + "\n")
    assert [int(number) for number, _, _ in items] == list(range(1, len(items) + 1))
    assert len(items) > 5
    return [
        Stop(file, found.group(1) if (found := _THROUGH.search(text)) else None) for _, file, text in items
    ]


@cache
def imports(file: str) -> frozenset[str]:
    """The files that `file` imports, also inside a function; names that a package re-exports count as its files."""
    return frozenset(_imported(SOURCE / file))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from _files(node.module)
            package = SOURCE.parent.joinpath(*node.module.split("."), "__init__.py")
            for alias in node.names:
                yield from _files(f"{node.module}.{alias.name}")
                if package.is_file() and package != path:
                    yield from _exported(package, alias.name)


def _exported(package: Path, name: str) -> Iterator[str]:
    """The files from which a package takes a name, such as a kernel by its name without the underscore."""
    for node in ast.walk(ast.parse(package.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    yield from _files(node.module)
                    yield from _files(f"{node.module}.{alias.name}")


def _files(module: str) -> Iterator[str]:
    path = SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")
    if path.is_file() and path.is_relative_to(SOURCE):
        yield str(path.relative_to(SOURCE))


def test_the_page_lists_the_layers_that_import_linter_checks() -> None:
    settings = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = [layer.strip("()") for contract in contracts for layer in contract.get("layers", ())]
    listed = PAGE.read_text(encoding="utf-8").split("```text\n")[1].split("\n```")[0]

    assert listed.splitlines() == layers


def test_the_page_says_what_every_package_holds() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| package | what it holds |")[1].split("\n\n")[0]
    packages = {
        path.stem for path in SOURCE.iterdir() if path.stem.isalpha() and path.suffix in ("", ".py")
    } - {"aio", "cost", "operators", "telemetry", "testing"}

    assert set(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|$", "", table, flags=re.MULTILINE))) == packages


@pytest.mark.parametrize("name", WALKS)
def test_every_file_of_a_walk_exists(name: str) -> None:
    missing = {stop.file for stop in walk(name) if not (SOURCE / stop.file).is_file()}

    assert not missing


@pytest.mark.parametrize("name", WALKS)
def test_an_earlier_file_of_a_walk_imports_each_file_or_what_it_is_reached_through(name: str) -> None:
    stops = walk(name)
    seen, known = {stops[0].file}, set(imports(stops[0].file))
    unreachable = []
    for stop in stops[1:]:
        if stop.through is None:
            reached = stop.file in seen | known
        else:
            connected = stop.through in imports(stop.file) or stop.file in imports(stop.through)
            reached = connected and stop.through in seen | known
        if not reached:
            unreachable.append(stop.file)
        seen.add(stop.file)
        known |= imports(stop.file)

    assert not unreachable


@pytest.mark.parametrize("name", WALKS)
def test_a_line_says_reached_through_only_if_no_earlier_file_imports_the_file(name: str) -> None:
    stops = walk(name)
    idle = [
        stop.file
        for at, stop in enumerate(stops)
        if stop.through is not None and any(stop.file in imports(former.file) for former in stops[:at])
    ]

    assert not idle


def test_no_walk_names_a_file_twice_in_a_row() -> None:
    repeated = [
        (name, one.file) for name in WALKS for one, two in pairwise(walk(name)) if one.file == two.file
    ]

    assert not repeated


def test_a_put_passes_through_at_most_16_files_and_enters_the_engine_at_most_twice() -> None:
    files = [stop.file for stop in walk("put, until it is durable")]

    assert len(set(files)) <= 16
    assert files.count("db/writer/engine.py") <= 2


class Trace:
    """The files that this thread and threads started since entered while `operation` ran, in order."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._on = False
        self._ended = False
        sys.setprofile(self._enter)
        threading.setprofile(self._enter)

    def of(self, operation: Callable[[], object]) -> list[str]:
        self._files, self._on = [], True
        try:
            operation()
        finally:
            self._on = False
        return list(self._files)

    def end(self) -> None:
        self._ended = True
        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if self._ended:
            sys.setprofile(None)  # a thread of the shared pool, which outlives this test
        elif self._on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):
                self._files.append(str(path.relative_to(SOURCE)))


@pytest.fixture
def trace() -> Iterator[Trace]:
    """A trace of the threads that a database starts after this; a debugger or coverage of `sys.setprofile` is lost."""
    started = Trace()
    yield started
    started.end()


def untraced(stop: Stop) -> bool:
    """Whether a file leaves no trace: kernels, because their compiled form has no Python frames."""
    return stop.file.startswith("kernels/")


def assert_in_order(name: str, entered: list[str]) -> None:
    remaining = iter(entered)
    missed = [stop.file for stop in walk(name) if not untraced(stop) and stop.file not in remaining]

    assert not missed, f"{missed[0]} is not entered where the walk {name!r} says so"


QUIET = Settings(compactor_options=None, garbage_collector_options=None)


def test_a_durable_put_passes_through_its_files_in_this_order(tmp_path: Path, trace: Trace) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(
            b"first", b"value", await_durable=True
        )  # the writer reads the manifest now and trusts it for a while
        entered = trace.of(lambda: db.put(b"key", b"value", await_durable=True))

    assert_in_order("put, until it is durable", entered)


def test_a_cold_get_and_a_cold_scan_pass_through_their_files_in_this_order(
    tmp_path: Path, trace: Trace
) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        for number in range(10_000):
            db.put(b"key/%05d" % number, b"value" * 20)
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        got = trace.of(lambda: db.get(b"key/00500"))
        scanned = trace.of(lambda: list(db.scan(b"key/05000", b"key/05100")))

    assert_in_order("get, with nothing in memory", got)
    assert_in_order("scan", scanned)


def test_a_change_read_passes_through_its_files_in_this_order(tmp_path: Path, trace: Trace) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(b"key", b"value", await_durable=True)
        reader = flagstone.WalReader(tmp_path / "db", pin="consumer")

        def read() -> None:
            for batch in reader.follow(timeout_s=0):
                reader.commit(batch)

        entered = trace.of(read)

    assert_in_order("change read", entered)
