"""From kept results to the page and its charts."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.harness import (
    FLAGSTONE,
    PARQUET,
    ROCKS,
    WHEEL,
    Bars,
    Curve,
    Measurement,
    compared,
    formatted,
    write_markdown,
)

from bench import front_page, harness, summary


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(harness.RESULTS_VARIABLE, str(tmp_path / "results"))
    return tmp_path / "results"


def test_a_ratio_above_one_is_in_our_favour_for_times_and_for_rates() -> None:
    slower = Measurement("get", "µs", {FLAGSTONE: 2.0, WHEEL: 100.0}, "lower")
    faster = Measurement("scan", "rows/s", {FLAGSTONE: 100.0, WHEEL: 50.0, ROCKS: 200.0}, "higher")

    assert slower.ratio(WHEEL) == 50
    assert slower.ratio(ROCKS) is None
    assert faster.ratio(WHEEL) == 2
    assert faster.ratio(ROCKS) == 0.5


def test_a_comparison_leaves_blank_what_was_not_measured() -> None:
    header, rows = compared([Measurement("get", "µs", {FLAGSTONE: 1.234, ROCKS: 2.468})])

    assert header == ["what", "flagstone", "slatedb 0.17", "rocksdict", "× wheel", "× rocksdict"]
    assert rows == [["get", "1.23 µs", "", "2.47 µs", "", "2.00×"]]


@pytest.mark.parametrize(
    ("figure", "unit", "expected"),
    [
        (1234.5, "ms", "1,234 ms"),
        (12.345, "s", "12.3 s"),
        (0.456, "µs", "0.46 µs"),
        (7.0, "", "7"),
        (None, "s", ""),
    ],
)
def test_figures_are_rounded_to_their_significant_digits(
    figure: float | None, unit: str, expected: str
) -> None:
    assert formatted(figure, unit) == expected


def test_the_page_has_every_comparison_and_every_chart_it_names(folder: Path) -> None:
    write_markdown("plain", "A table only", ["a", "b"], [["1", "2"]], ["a remark"])
    write_markdown(
        "engine", "With a peer", ["what"], [], [],
        measurements=[
            Measurement("get", "µs", {FLAGSTONE: 1.0, WHEEL: 50.0, ROCKS: 2.0}),
            Measurement("load", "rows/s", {FLAGSTONE: 1.0, PARQUET: 2.0}, "higher"),
        ],
    )  # fmt: skip
    far = Measurement("a far put", "ms", {FLAGSTONE: 1.0, WHEEL: 9.0})
    write_markdown("remote", "Far", ["what"], [], [], measurements=[far])
    points = {FLAGSTONE: [(1e5, 1.0), (1e6, 2.0)], ROCKS: [(1e5, 3.0)]}
    write_markdown(
        "scaling", "Curves", ["what"], [], [],
        curves=[Curve("put", "Put", "ms", points, "the processor")],
        bars=[Bars("dollars", "Dollars", "$", {"idle": {"S3": 1.5}})],
    )  # fmt: skip

    page = summary.write_summary()

    text = page.read_text()
    assert page == folder / "README.md"
    assert "| [get](engine.md) | 1.00 µs | 50.0 µs | 2.00 µs |  | 50.0× | 2.00× |  |" in text
    assert "| [load](engine.md) | 1.00 rows/s |  |  | 2.00 rows/s |  |  | 0.50× |" in text
    assert "| 1 | 2 |" in text
    assert "a remark" in text
    assert "the processor" in text
    for chart in ("ratios.svg", "remote-ratios.svg", "scaling-put.svg", "scaling-dollars.svg"):
        assert f"({chart})" in text
        assert (folder / chart).exists()


def test_a_chart_without_a_result_is_deleted(folder: Path) -> None:
    folder.mkdir()
    (folder / "gone-put.svg").write_text("old")

    summary.write_summary()

    assert not (folder / "gone-put.svg").exists()


def test_a_page_of_a_smoke_run_has_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(harness.QUICK_VARIABLE, "1")
    write_markdown("plain", "A table only", ["a"], [["1"]], [])

    assert "mean nothing" in summary.write_summary().read_text()
    assert "mean nothing" in (folder / "README.md").read_text()


def test_the_readme_of_the_project_shows_the_stored_results() -> None:
    page = front_page.PAGE.read_text()
    assert page == front_page.front_page(page, summary.load_results(harness.RESULTS))


def test_the_best_value_of_a_line_is_bold_and_unmeasured_values_are_blank() -> None:
    results = [
        {
            "name": name,
            "date": "2026-01-02",
            "machine": {"cores": 4},
            "measurements": [
                {
                    "what": what,
                    "unit": "µs" if name == "engine" else "krows/s",
                    "better": "lower" if name == "engine" else "higher",
                    "values": {FLAGSTONE: 2000.0, WHEEL: 3000.0},
                }
            ],
        }
        for _, name, what in front_page.LINES
    ]
    page = front_page.front_page(f"a\n{front_page.BEGIN}\nold\n{front_page.END}\nb\n", results)
    assert page.startswith("a\n")
    assert page.endswith("\nb\n")
    assert "old" not in page
    assert "Measured on 2026-01-02 on one small machine (4 cores)" in page
    assert "| put, not waiting | **2,000 µs** | 3,000 µs |  |  |" in page
    assert "| compaction | 2.00 M rows/s | **3.00 M rows/s** |  |  |" in page
