"""What was measured in seconds stands beside the line of the README's table that says the same."""

from __future__ import annotations

import pytest
from bench.harness import FLAGSTONE, RESULTS, Measurement

from bench import compaction, engine, front_page, rates, spark, summary


def test_every_line_of_the_readme_has_a_row_also_without_a_measurement() -> None:
    rows = rates.beside([])

    assert [row.label for row in rows] == [label for label, _, _ in front_page.LINES]
    assert {row.here for row in rows} == {row.ratio for row in rows} == {None}
    page = front_page.PAGE.read_text()
    for row in rows:
        assert f"| {row.label} | " in page
        assert front_page.figure_text(row.readme.values[FLAGSTONE], row.readme.unit) in page


def test_a_ratio_above_one_is_better_than_the_readme_for_times_and_for_rates() -> None:
    there = {row.label: row.readme for row in rates.beside([])}
    put, scan = there["put, not waiting"], there["full scan"]
    quicker = Measurement(put.what, put.unit, {FLAGSTONE: put.values[FLAGSTONE] / 2}, put.better)
    slower = Measurement(scan.what, scan.unit, {FLAGSTONE: scan.values[FLAGSTONE] / 4}, scan.better)

    found = {row.label: row.ratio for row in rates.beside([quicker, slower])}

    assert found["put, not waiting"] == pytest.approx(2)
    assert found["full scan"] == pytest.approx(0.25)
    assert [label for label, ratio in found.items() if ratio is not None] == ["put, not waiting", "full scan"]


def test_fewer_rows_of_spark_stand_beside_the_line_of_more() -> None:
    what = spark.READ.format(rates.SPARK_ROWS)
    found = rates.beside([Measurement(what, "krows/s", {FLAGSTONE: 1.0}, "higher")])

    assert [(row.label, row.here.what) for row in found if row.here] == [("Spark: read 5 M rows", what)]


def test_the_sizes_are_those_of_the_stored_results() -> None:
    """The functions are shared, so only their sizes could differ."""
    stored = front_page.published(summary.load_results(RESULTS))

    assert stored["flush"][1].what == f"flush of {engine.FLUSH_MB:.0f} MB"
    assert 100 in compaction.VALUE_BYTES
    assert stored["compaction"][1].what == compaction.throughput(100, {}).what
    assert stored["Spark: read 5 M rows"][1].what == spark.READ.format(spark.ROWS)
