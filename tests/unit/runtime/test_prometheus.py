from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.runtime import metric_names as names
from flagstone.runtime.metric_help import HELP
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.prometheus import render, render_several

parser = pytest.importorskip("prometheus_client.parser", reason="the parser of Prometheus is the judge here")


def parsed(text: str) -> dict[str, Any]:
    """The families of a text by name; fails if a family occurs twice, as Prometheus does."""
    families = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def test_a_counter_ends_in_total_and_has_its_help_type_and_labels() -> None:
    metrics = Metrics()
    metrics.counter(names.DB_REQUEST_COUNT, op="get").add(3)

    assert render(metrics.snapshot()) == (
        f"# HELP slatedb_db_request_count_total {HELP[names.DB_REQUEST_COUNT]}\n"
        "# TYPE slatedb_db_request_count_total counter\n"
        'slatedb_db_request_count_total{op="get"} 3\n'
    )


def test_the_parser_finds_counters_gauges_and_histograms() -> None:
    metrics = Metrics()
    metrics.counter("a.b").add(7)
    metrics.gauge("a.c").set(-1.5)
    histogram = metrics.histogram("a.d", op="get")
    for seconds in (0.0001, 0.02, 99.0):
        histogram.record(seconds)

    found = parsed(render(metrics.snapshot()))

    assert (found["a_b"].type, found["a_b"].samples[0].value) == ("counter", 7)
    assert (found["a_c"].type, found["a_c"].samples[0].value) == ("gauge", -1.5)
    samples = {(each.name, each.labels.get("le")): each.value for each in found["a_d"].samples}
    assert found["a_d"].type == "histogram"
    assert samples["a_d_bucket", "0.0001"] == 1
    assert samples["a_d_bucket", "0.025"] == 2
    assert samples["a_d_bucket", "+Inf"] == samples["a_d_count", None] == 3
    assert samples["a_d_sum", None] == pytest.approx(99.0201)
    buckets = [each.value for each in found["a_d"].samples if each.name == "a_d_bucket"]
    assert buckets == sorted(buckets)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from('\\"\n{},= ')))
def test_every_label_value_survives_the_parser(value: str) -> None:
    metrics = Metrics()
    metrics.counter("a.b", path=value).add()

    samples = parsed(render(metrics.snapshot()))["a_b"].samples

    assert [each.labels for each in samples] == [{"path": value}]


@given(st.text(alphabet=string.printable, min_size=1))
def test_every_name_becomes_one_that_the_parser_accepts(name: str) -> None:
    metrics = Metrics()
    metrics.gauge(f"a{name}").set(2)

    assert [family.samples[0].value for family in parsed(render(metrics.snapshot())).values()] == [2]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 1e300, 5e-324, 2**63])
def test_every_number_survives_the_parser(value: float) -> None:
    metrics = Metrics()
    metrics.gauge("a").set(value)

    assert parsed(render(metrics.snapshot()))["a"].samples[0].value == value


def test_samples_of_several_databases_are_in_one_family() -> None:
    one, other = Metrics(), Metrics()
    one.gauge("a").set(1)
    other.gauge("a").set(2)

    found = parsed(
        render_several([(one.snapshot(), {"database": "x"}), (other.snapshot(), {"database": "y"})])
    )

    assert [(each.labels["database"], each.value) for each in found["a"].samples] == [("x", 1), ("y", 2)]


def test_the_label_of_a_metric_wins_over_an_added_one() -> None:
    metrics = Metrics()
    metrics.counter("a", op="get").add()

    samples = parsed(render(metrics.snapshot(), labels={"op": "mine", "job": "shop"}))["a"].samples

    assert samples[0].labels == {"op": "get", "job": "shop"}
