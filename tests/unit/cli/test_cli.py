"""Output, exit codes and errors of the command line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flagstone.cli.main import app, load_env_file
from flagstone.cli.process import exit_code
from flagstone.errors import (
    Closed,
    CorruptData,
    InternalError,
    InvalidRequest,
    TransactionConflict,
    Unavailable,
)
from golden.corpus import DATA


def flagstone(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_verify_of_a_sound_database_prints_sound_and_exits_with_zero() -> None:
    done = flagstone("--path", str(DATA / "basic" / "db"), "verify")
    assert done.exit_code == 0, done.stderr
    assert "sound" in done.stdout
    assert "2 SSTs" in done.stdout
    assert "table" not in done.stdout


def test_verify_prints_json() -> None:
    done = flagstone("--path", "db", "--store", str(DATA / "basic"), "--json", "verify")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["rows"] == 153
    assert report["objects"]["sst"] == 2
    assert "table" not in report["objects"]


def test_verify_of_a_damaged_database_names_the_object_and_exits_with_six(tmp_path: Path) -> None:
    shutil.copytree(DATA / "basic", tmp_path / "store")
    sst = max((tmp_path / "store/db/compacted").iterdir())
    sst.write_bytes(b"\0" * 100)
    done = flagstone("--path", str(tmp_path / "store/db"), "verify")
    assert done.exit_code == 6
    assert sst.name in done.stdout
    assert "damaged" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--path", "/nowhere/at/all", "verify"), "no database at"),
        (("--path", "ftp://host/db", "verify"), "there is no store for ftp://"),
        (("--path", "db", "--env-file", "/nowhere.env", "verify"), "cannot read the env file"),
    ],
)
def test_a_bad_request_prints_one_line_and_exits_with_two(arguments: tuple[str, ...], words: str) -> None:
    done = flagstone(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_kind_of_error_has_its_exit_code() -> None:
    codes = [
        exit_code(error)
        for error in (
            InvalidRequest(""),
            TransactionConflict(""),
            Closed(""),
            Unavailable(""),
            CorruptData(""),
            InternalError(""),
        )
    ]
    assert codes == [2, 3, 4, 5, 6, 70]


def test_an_env_file_sets_only_missing_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "env"
    file.write_text("# credentials\nexport FLAGSTONE_TEST_A='one'\nFLAGSTONE_TEST_B=two=2\n")
    monkeypatch.setenv("FLAGSTONE_TEST_B", "kept")
    monkeypatch.delenv("FLAGSTONE_TEST_A", raising=False)
    load_env_file(file)
    assert os.environ["FLAGSTONE_TEST_A"] == "one"
    assert os.environ["FLAGSTONE_TEST_B"] == "kept"
    monkeypatch.delenv("FLAGSTONE_TEST_A")


def test_an_invalid_or_missing_env_file_raises_invalid_request(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("just words\n")
    with pytest.raises(InvalidRequest, match="line 1 is not KEY=VALUE"):
        load_env_file(file)
