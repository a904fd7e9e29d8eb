"""Charts are well-formed, and every element is where it belongs."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from bench.charts import bar_chart, line_chart, ratio_chart
from hypothesis import given
from hypothesis import strategies as st

SVG = "{http://www.w3.org/2000/svg}"
ENGINES = ("flagstone", "wheel", "rocksdict", "Parquet")
labels = st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1)
figures = st.floats(min_value=1e-4, max_value=1e9)


def parse(chart: str) -> ET.Element:
    return ET.fromstring(chart)


def texts(chart: str) -> list[str]:
    return [found.text or "" for found in parse(chart).iter(f"{SVG}text")]


def bars(chart: str) -> list[dict[str, float]]:
    """Position and width of each bar, without the card behind the chart."""
    return [
        {"x": float(found.attrib["x"]), "width": float(found.attrib["width"])}
        for found in parse(chart).iter(f"{SVG}rect")
        if re.fullmatch(r"c\d", found.attrib["class"]) and "rx" in found.attrib
    ]


def test_a_ratio_above_one_goes_right_and_one_below_goes_left_by_the_same_length() -> None:
    better, worse = bars(ratio_chart("t", "s", {"a": {"wheel": 10.0}, "b": {"wheel": 0.1}}, ENGINES))

    assert better["x"] == pytest.approx(worse["x"] + worse["width"], abs=0.2)
    assert better["width"] == pytest.approx(worse["width"], abs=0.2)


def test_a_ratio_of_a_hundred_is_twice_as_long_as_one_of_ten() -> None:
    ten, hundred = bars(ratio_chart("t", "s", {"a": {"wheel": 10.0}, "b": {"wheel": 100.0}}, ENGINES))

    assert hundred["width"] == pytest.approx(2 * ten["width"], abs=0.3)


def test_names_with_markup_are_escaped() -> None:
    chart = ratio_chart('a "title" <b>', "x & y", {"<put> & 'get'": {"wheel": 3.0}}, ENGINES)

    assert {'a "title" <b>', "x & y", "<put> & 'get'", "3×"} <= set(texts(chart))


def test_the_legend_names_only_what_is_drawn() -> None:
    found = texts(ratio_chart("t", "s", {"a": {"Parquet": 0.5}}, ENGINES))

    assert "× Parquet" in found
    assert "× wheel" not in found


def test_a_straight_line_in_logarithms_is_drawn_straight() -> None:
    points = [(1e5, 10.0), (1e6, 100.0), (1e7, 1000.0)]

    chart = line_chart("t", "s", {"flagstone": points}, ENGINES, x_name="rows", y_name="ms")

    drawn = next(parse(chart).iter(f"{SVG}polyline")).attrib["points"]
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point.split(","))) for point in drawn.split()]
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.3)
    assert y2 < y0  # more is higher
    assert {"10⁵", "10⁶", "10⁷"} <= set(texts(chart))


def test_every_coloured_element_has_a_colour_for_dark_pages() -> None:
    style = next(parse(bar_chart("t", "s", {"a": {"x": 1.0}}, "$")).iter(f"{SVG}style")).text or ""
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")

    for name in (
        "text",
        ".quiet",
        ".card",
        ".grid",
        ".one",
        ".c0",
        ".c1",
        ".c2",
        ".c3",
        ".s0",
        ".s1",
        ".s2",
        ".s3",
    ):
        assert f"{name} {{" in light
        assert f"{name} {{" in dark


@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1), figures, min_size=1
    )
)
def test_any_figures_stay_inside_the_chart(found: dict[str, float]) -> None:
    rows = {label: {"wheel": figure} for label, figure in found.items()}

    for chart in (ratio_chart("t", "s", rows, ENGINES), bar_chart("t", "s", rows, "ms")):
        for bar in bars(chart):
            assert bar["x"] >= 0
            assert math.isfinite(bar["width"])
            assert bar["width"] >= 1


@given(st.lists(st.tuples(st.floats(1, 1e9), figures), min_size=1, max_size=5))
def test_any_points_stay_inside_the_axes(points: list[tuple[float, float]]) -> None:
    chart = line_chart("t", "s", {"wheel": points}, ENGINES, x_name="rows", y_name="ms")

    drawn = next(parse(chart).iter(f"{SVG}polyline")).attrib["points"]
    for point in drawn.split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= 760
        assert 100 <= y <= 385
