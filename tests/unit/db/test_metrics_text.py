"""`metrics_text()` of a writer, a reader and their asyncio forms, judged by the parser of Prometheus."""

from __future__ import annotations

from typing import Any

import pytest

import flagstone
from flagstone import Settings, aio
from flagstone.runtime.metric_help import HELP
from flagstone.store.memory import MemoryStore

parser = pytest.importorskip("prometheus_client.parser", reason="the parser of Prometheus is the judge here")


def samples(text: str) -> dict[str, float]:
    found: dict[str, Any] = {}
    for family in parser.text_string_to_metric_families(text):
        for each in family.samples:
            found[each.name, tuple(sorted(each.labels.items()))] = each.value
    return {f"{name}{dict(labels) or ''}": value for (name, labels), value in found.items()}


def test_the_text_of_a_writer_has_the_values_of_its_metrics() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=Settings(compactor_options=None)) as db:
        db.put(b"a", b"1")
        db.flush()
        db.get(b"a")
        found = samples(db.metrics_text())
    assert found["slatedb_db_write_ops_total"] == 1
    assert found["slatedb_db_request_count_total{'op': 'get'}"] == 1
    assert found["slatedb_db_l0_sst_count"] == 1
    assert found["flagstone_db_live_bytes"] > 0
    assert found["flagstone_db_writer_epoch"] == 1


def test_every_metric_of_a_writer_has_a_help_sentence() -> None:
    with flagstone.open("db", store=MemoryStore()) as db:
        text = db.metrics_text(labels={"job": "shop"})
        told = {metric.partition("{")[0] for metric in db.metrics()}
    assert told <= HELP.keys()
    assert all('job="shop"' in line for line in text.splitlines() if not line.startswith("#"))


def test_a_reader_reports_the_shape_of_the_tree_it_shows() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=Settings(compactor_options=None)) as db:
        for number in range(3):
            db.put(b"%d" % number, b"v")
            db.flush()
        with flagstone.open_reader("db", store=store, mode="latest") as reader:
            found = samples(reader.metrics_text())
            assert found["slatedb_db_l0_sst_count"] == 3
            assert found["flagstone_db_manifest_id"] == reader.status()["manifest_id"]
            assert found["flagstone_reader_poll_failing"] == 0


async def _text() -> str:
    async with await aio.open("db", store=MemoryStore()) as db:
        await db.put(b"a", b"1")
        return await db.metrics_text(labels={"a": "b"})


def test_the_asyncio_form_returns_the_same_text() -> None:
    import asyncio

    assert samples(asyncio.run(_text()))["slatedb_db_write_ops_total{'a': 'b'}"] == 1


def test_a_closed_reader_keeps_its_last_figures() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=Settings(compactor_options=None)) as db:
        db.put(b"a", b"1")
        db.flush()
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        reader.status()
    assert samples(reader.metrics_text())["slatedb_db_l0_sst_count"] == 1
    assert reader.status()["cost"]["dollars"] > 0
