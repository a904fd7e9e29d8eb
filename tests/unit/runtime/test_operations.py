"""Operations are timed, and are spans only for an application that has imported OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import flagstone
from flagstone import Settings
from flagstone.runtime import metric_names as names
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.operations import Operation
from flagstone.store.memory import MemoryStore


class Recorder:
    """A module like `opentelemetry.trace`, which notes the spans as they begin and end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def get_tracer(self, name: str) -> Recorder:
        assert name == "flagstone"
        return self

    @contextmanager
    def start_as_current_span(self, name: str, *, attributes: dict[str, str]) -> Iterator[None]:
        assert attributes == {"db.system.name": "flagstone", "db.operation.name": name.partition(".")[2]}
        self.events.append(f"begin {name}")
        try:
            yield
        except Exception as error:
            self.events.append(f"error {type(error).__name__}")
            raise
        finally:
            self.events.append(f"end {name}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", recorder)  # type: ignore[arg-type]
    return recorder


def counts(metrics: dict[str, Any]) -> dict[str, int]:
    prefix = f"{names.DB_OPERATION_SECONDS}{{op="
    return {
        name.removeprefix(prefix).rstrip("}"): value.count
        for name, value in metrics.items()
        if name.startswith(prefix) and value.count
    }


def test_without_opentelemetry_an_operation_is_only_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    histogram = Metrics().histogram("a")
    with Operation(histogram, "get").measure():
        pass
    assert histogram.value.count == 1
    assert "opentelemetry.trace" not in sys.modules


def test_an_error_in_an_operation_ends_its_span_and_is_counted(recorder: Recorder) -> None:
    histogram = Metrics().histogram("a")
    with pytest.raises(ValueError, match="x"), Operation(histogram, "get").measure():
        raise ValueError("x")
    assert recorder.events == ["begin flagstone.get", "error ValueError", "end flagstone.get"]
    assert histogram.value.count == 1


def test_a_durable_put_a_flush_and_a_cold_get_are_spans_and_observations(recorder: Recorder) -> None:
    store = MemoryStore()
    quiet = Settings(compactor_options=None, garbage_collector_options=None)
    with flagstone.open("db", store=store, settings=quiet) as db:
        db.put(b"a", b"1", await_durable=True)
        db.flush()
        assert {f"begin flagstone.{op}" for op in ("put", "wal_upload", "flush", "memtable_flush")} <= set(
            recorder.events
        )
        assert db.get(b"a") == b"1"
        found = counts(db.metrics())
    assert found["wal_upload"] == 1
    assert found["put"] == found["flush"] == found["memtable_flush"] == 1
    recorder.events.clear()
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        assert reader.get(b"a") == b"1"
        assert reader.get(b"a") == b"1"  # from memory: neither timed nor traced
        assert counts(reader.metrics()) == {"get": 1}
    assert recorder.events == ["begin flagstone.get", "end flagstone.get"]


def test_importing_and_using_flagstone_never_imports_opentelemetry() -> None:
    code = (
        "import sys, flagstone\n"
        "with flagstone.open('memory://a/db') as db: db.put(b'a', b'1', await_durable=True); db.flush()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
