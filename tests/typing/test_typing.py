"""mypy and pyright accept a user's program in their strict modes, and find the mistakes of another one."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flagstone

HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent
MISTAKES = {
    number
    for number, line in enumerate((HERE / "mistakes.py").read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# mistake")
}
ENVIRONMENT = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}


def test_the_program_runs() -> None:
    runpy.run_path(str(HERE / "program.py"), run_name="__main__")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder outside of the project, whose settings do not count there."""
    for name in ("program.py", "mistakes.py"):
        shutil.copy(HERE / name, tmp_path)
    return tmp_path


def checked(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout, done.stderr
    return done.stdout


@pytest.mark.slow
def test_mypy_accepts_the_program_and_finds_the_mistakes(programs: Path) -> None:
    pytest.importorskip("mypy")
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--no-error-summary"]
    report = checked(SCRIPTS / "mypy", *options, "program.py", "mistakes.py", folder=programs)
    found = set(re.findall(r"(\w+)\.py:(\d+): error", report))
    assert found == {("mistakes", str(number)) for number in MISTAKES}, report


@pytest.mark.slow
def test_pyright_accepts_the_program_and_finds_the_mistakes(programs: Path) -> None:
    pytest.importorskip("pyright")
    source = str(Path(flagstone.__file__).parents[1])
    settings = {"typeCheckingMode": "strict", "include": ["."], "extraPaths": [source]}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    report = checked(SCRIPTS / "pyright", "--outputjson", folder=programs)
    errors = [each for each in json.loads(report)["generalDiagnostics"] if each["severity"] == "error"]
    found = {(Path(each["file"]).stem, each["range"]["start"]["line"] + 1) for each in errors}
    assert found == {("mistakes", number) for number in MISTAKES}, errors
