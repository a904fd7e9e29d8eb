"""Sessions: finding a Java that is new enough, settings of Spark, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagstone.errors import Closed, CorruptData, InvalidRequest, Unavailable
from flagstone.spark import sessions
from flagstone.spark.error_translation import find_cause
from flagstone.spark.sessions import find_java_home, java_major, parse_major, wrapped_runtime


def fake_java(folder: Path, version: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("no such thing", None),
    ],
)
def test_the_version_is_parsed_from_the_output_of_java(text: str, major: int | None) -> None:
    assert parse_major(text) == major


def test_java_home_is_used_if_it_is_new_enough(tmp_path: Path) -> None:
    new, old = fake_java(tmp_path / "new", "21.0.1"), fake_java(tmp_path / "old", "11.0.2")

    assert find_java_home({"JAVA_HOME": str(new), "PATH": ""}) == new
    with pytest.raises(InvalidRequest, match="which is Java 11; Spark 4 needs 17"):
        find_java_home({"JAVA_HOME": str(old)})
    with pytest.raises(InvalidRequest, match="does not run; correct JAVA_HOME"):
        find_java_home({"JAVA_HOME": str(tmp_path / "nothing")})


def test_java_on_the_path_is_used_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = fake_java(tmp_path / "new", "17.0.1"), fake_java(tmp_path / "old", "1.8.0_1")
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    assert find_java_home({"PATH": f"{new}/bin"}) is None
    found = find_java_home({"PATH": f"{old}/bin"})

    assert found is not None
    assert found.is_relative_to(cache)
    monkeypatch.setattr(sessions, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match="java on the path is version 8"):
        find_java_home({"PATH": f"{old}/bin"})
    with pytest.raises(InvalidRequest, match="no java on the path"):
        find_java_home({"PATH": str(tmp_path)})


@pytest.mark.slow
def test_the_java_that_pip_installed_runs_through_its_wrapper(tmp_path: Path) -> None:
    home = wrapped_runtime(tmp_path)
    program = home / "bin" / "java"

    assert java_major(program) == 21
    run = subprocess.run(
        [str(program), "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0
    before = program.stat().st_mtime_ns
    assert wrapped_runtime(tmp_path) == home
    assert program.stat().st_mtime_ns == before


def test_without_pyspark_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)

    with pytest.raises(InvalidRequest, match=r"pip install 'flagstone\[spark\]'"):
        sessions.session()


def test_importing_flagstone_and_its_spark_package_imports_no_pyspark() -> None:
    code = "import sys, flagstone, flagstone.spark; print('pyspark' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)

    assert run.stdout.strip() == "False"


class Builder:
    """Accepts settings as Spark's builder does."""

    def __init__(self, **options: str) -> None:
        self._options = dict(options)

    def config(self, name: str, value: str) -> Builder:
        self._options[name] = value
        return self

    def master(self, value: str) -> Builder:
        return self.config("spark.master", value)


def test_a_session_builder_gets_missing_settings_and_keeps_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "java", "21")))
    for name in ("MASTER", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)

    plain = sessions.configure(Builder())._options
    chosen = sessions.configure(
        Builder(**{"spark.ui.enabled": "true", "spark.master": "spark://a:1"})
    )._options

    assert plain["spark.master"] == "local[*]"
    assert plain["spark.driver.host"] == "127.0.0.1"
    assert plain["spark.sql.python.filterPushdown.enabled"] == "true"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert chosen["spark.ui.enabled"] == "true"
    assert chosen["spark.master"] == "spark://a:1"
    assert "spark.driver.host" not in chosen


def test_our_error_is_found_in_the_error_of_spark() -> None:
    text = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed when running: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in <module>\n'
        "flagstone.errors.{}\n\n\tat org.apache.spark.api.python.BasePythonRunner"
    )
    found = find_cause(text.format("InvalidRequest: column 'key' has 1 nulls"))
    assert isinstance(found, InvalidRequest)
    assert str(found) == "column 'key' has 1 nulls"
    fenced = find_cause(text.format("Closed: a newer writer (epoch 3) has replaced this one"))
    assert isinstance(fenced, Closed)
    assert fenced.reason == "fenced"
    assert isinstance(find_cause(text.format("CorruptData: x at byte 3: checksum")), CorruptData)
    gone = find_cause("flagstone.sst.store.SstGone: the SST at x is gone")
    assert isinstance(gone, Unavailable)
    assert find_cause("something else: went wrong") is None
    assert find_cause("flagstone.nowhere.Error: no") is None
