"""The command line as a user meets it: output, exit codes, errors in one line."""

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


def test_verify_says_sound_and_exits_zero() -> None:
    done = flagstone("--path", str(DATA / "basic" / "db"), "verify")
    assert done.exit_code == 0, done.stderr
    assert "sound" in done.stdout


def test_verify_speaks_json() -> None:
    done = flagstone("--path", "db", "--store", str(DATA / "basic"), "--json", "verify")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["rows"] == 153


def test_damage_exits_with_six_and_names_the_object(tmp_path: Path) -> None:
    shutil.copytree(DATA / "basic", tmp_path / "store")
    table = max((tmp_path / "store/db/compacted").iterdir())
    table.write_bytes(b"\0" * 100)
    done = flagstone("--path", str(tmp_path / "store/db"), "verify")
    assert done.exit_code == 6
    assert table.name in done.stdout
    assert "damaged" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--path", "/nowhere/at/all", "verify"), "no database at"),
        (("--path", "ftp://host/db", "verify"), "there is no store for ftp://"),
        (("--path", "db", "--env-file", "/nowhere.env", "verify"), "cannot read the env file"),
    ],
)
def test_bad_requests_are_one_line_and_exit_with_two(arguments: tuple[str, ...], words: str) -> None:
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


def test_an_env_file_fills_in_what_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "env"
    file.write_text("# credentials\nexport FLAGSTONE_TEST_A='one'\nFLAGSTONE_TEST_B=two=2\n")
    monkeypatch.setenv("FLAGSTONE_TEST_B", "kept")
    monkeypatch.delenv("FLAGSTONE_TEST_A", raising=False)
    load_env_file(file)
    assert os.environ["FLAGSTONE_TEST_A"] == "one"
    assert os.environ["FLAGSTONE_TEST_B"] == "kept"
    monkeypatch.delenv("FLAGSTONE_TEST_A")


def test_an_env_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("just words\n")
    with pytest.raises(InvalidRequest, match="line 1 is not KEY=VALUE"):
        load_env_file(file)
