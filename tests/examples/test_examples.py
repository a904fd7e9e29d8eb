"""Every example runs on small data, and checks its own result; so does the demo, on a machine without Java."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from bench.front_page import BEGIN, END, PAGE
from bench.harness import QUICK_VARIABLE

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_SPARK = [pytest.mark.slow, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def path_without_java(folder: Path) -> str:
    """A PATH with every program of this machine but `java`."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            if program.name != "java" and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return str(folder)


def processes_of_session(session: int) -> list[str]:
    """The names of the processes that a process started as leader of a session has left behind."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        if int(fields.split()[3]) == session:
            found.append(name.partition("(")[2])
    return found


@pytest.mark.slow
def test_the_session_store_example_prints_what_it_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("session_store").main(tmp_path)

    assert "10 log-ins at once, 3 sessions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "last_words"),
    [
        ("job_queue", "after its lease had expired, another worker ran the last job"),
        ("orders_report", "the reports agree with the service"),
        ("sqlite_copy", "the copy equals the database"),
    ],
)
def test_an_example_without_spark_runs_to_its_end(
    name: str, last_words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module(name).main(tmp_path)

    assert capsys.readouterr().out.splitlines()[-1] == last_words


@pytest.mark.parametrize(
    ("name", "last_words"),
    [
        pytest.param("feature_store", "training uses the rows that were served", marks=ON_SPARK),
        pytest.param("cdc_to_parquet", "both equal the database, change for change", marks=ON_SPARK),
        pytest.param("nightly_load", "forgotten: catalogue-2026-11-16", marks=[*ON_SPARK, pytest.mark.long]),
        pytest.param("compaction_fleet", "2,000 rows, all as they were written", marks=ON_SPARK),
    ],
)
def test_a_spark_example_runs_to_its_end(
    name: str, last_words: str, spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module(name).main(spark, tmp_path)

    assert last_words in capsys.readouterr().out.splitlines()[-1]


def test_the_compaction_fleet_without_slatedb_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyspark")
    fleet = importlib.import_module("compaction_fleet")
    monkeypatch.setattr(fleet, "find_spec", lambda _: None)

    fleet.main(None, tmp_path)

    assert "pip install slatedb==0.17.0" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_pipeline_reads_follows_and_feeds_databases(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "pipeline" / "run.py")],
        env={**os.environ, "TMPDIR": str(tmp_path), "JDK_JAVA_OPTIONS": QUICK_JAVA},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )

    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "100 orders: 100 changes, 100 rows by customer, 14950 cents in all" in run.stdout


def figures_of_the_readme() -> dict[str, str]:
    """The label and Flagstone's figure of every line of the table on the project's first page."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {label.strip(): figure.strip(" *") for label, figure, *_ in lines if label.strip()}


def rates_in(told: str) -> dict[str, tuple[str, str]]:
    """The same of the demo's last table: what was measured here, and what is in the README."""
    table = told.partition("the README's table  ")[2].splitlines()[2:]
    lines = takewhile(str.strip, table)
    columns = [re.split(r" {2,}", line.strip()) for line in lines]
    return {label: (here, there) for label, here, there, *_ in columns}


def unit_of(figure: str) -> str:
    return figure.partition(" ")[2]


def figure_in(text: str) -> float:
    return float(text.partition(" ")[0].replace(",", ""))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_demo_runs_without_java_on_the_path_and_leaves_nothing_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment |= {"PATH": path_without_java(tmp_path / "bin"), "TMPDIR": str(temporary), "COLUMNS": "100"}
    environment |= {QUICK_VARIABLE: "1"}  # of the rates: they are measured, but mean nothing

    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo"), "--rows", "3000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        told, noise = demo.communicate(timeout=580)

    assert demo.returncode == 0, told[-3000:] + noise[-3000:]
    assert noise == ""
    assert "checks passed" in told
    assert re.search(r"orders and customers +3,300 ", told)
    shown = rates_in(told)
    readme = figures_of_the_readme()
    assert list(shown) == list(readme)
    assert {label: there for label, (_, there) in shown.items()} == readme
    for label, (here, there) in shown.items():
        assert unit_of(here) == unit_of(there), label
        assert figure_in(here) >= 0, label
    assert list(temporary.glob("flagstone-demo-*")) == []
    # Java ends by itself when it notices that its Python has.
    deadline = time.monotonic() + 60
    while processes_of_session(demo.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of_session(demo.pid) == []


@pytest.mark.slow
def test_the_demo_refuses_a_shop_without_orders_and_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo"), "--rows", "10"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert "fewer than 1,000 orders" in refused.stderr

    monkeypatch.syspath_prepend(str(EXAMPLES / "demo"))
    stage = importlib.import_module("stage")
    played = stage.Stage()
    played.check("rows", 1, 1)
    assert played.checks == 1
    with pytest.raises(stage.WrongResult, match="rows: found 1, expected 2"):
        played.check("rows", 1, 2)


def test_every_example_is_in_the_table_and_says_how_to_run_it() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = [*EXAMPLES.glob("*.py"), EXAMPLES / "demo" / "__main__.py", EXAMPLES / "pipeline" / "run.py"]

    assert len(programs) == 10
    for program in programs:
        # A folder with a __main__ is run by its own name.
        named = program.parent if program.name == "__main__.py" else program
        path = named.relative_to(EXAMPLES).as_posix()
        assert f"python examples/{path}" in program.read_text(encoding="utf-8"), path
        assert f"]({path.removesuffix('/run.py')}" in table, path
