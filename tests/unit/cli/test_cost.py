from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flagstone
from flagstone.cli.cost import PriceListName
from flagstone.cli.main import app
from flagstone.config.settings import PRICE_LIST_NAMES
from flagstone.cost import PRICE_LISTS
from unit.cli.running import Flagstone


def test_a_closed_database_costs_its_storage_and_an_idle_writer(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db") as db:
        db.put(b"a", b"1" * 100_000)
    cli = Flagstone(tmp_path / "db")
    stored = sum(path.stat().st_size for path in (tmp_path / "db").rglob("*") if path.is_file())

    found = cli.json("cost", "--price-list", "s3-express")

    prices = PRICE_LISTS["s3-express"]
    assert found["stored_bytes"] == stored
    assert found["storage_dollars_a_month"] == pytest.approx(stored * prices.stored_gb / 2**30)
    assert found["idle_dollars_a_month"] == pytest.approx(12 * 60 * 24 * 30 * prices.get)
    assert "a month, with default settings" in cli.ok("cost")


def test_the_metrics_of_a_running_database_give_the_cost_that_it_tells_itself(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings={"compactor_options": None}) as db:
        db.put(b"a", b"1", await_durable=True)
        db.flush()
        db.get(b"a")
    told = db.status()["cost"]
    (tmp_path / "metrics").write_text(db.metrics_text(labels={"job": 'a"b'}))
    cli = Flagstone(tmp_path / "db")

    found = cli.json("cost", "--metrics", str(tmp_path / "metrics"))

    for name in ("requests", "bytes_sent", "bytes_received", "operations", "dollars", "live_bytes"):
        assert found[name] == told[name], name
    shown = cli.ok("cost", "--metrics", "-", stdin=db.metrics_text().encode())
    assert "wal" in shown
    assert "a million operations" in shown


def test_text_without_metrics_of_flagstone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("go_threads 8\n")
    cli = Flagstone(tmp_path / "db")
    assert "has no sample of flagstone_cost" in cli.refused("cost", "--metrics", str(tmp_path / "metrics"))
    assert "cannot read the metrics" in cli.refused("cost", "--metrics", str(tmp_path / "none"))
    assert "no database at" in cli.refused("cost")
    (tmp_path / "metrics").write_text('flagstone_cost_requests_total{component="wal",kind="put"} many\n')
    assert "not a number" in cli.refused("cost", "--metrics", str(tmp_path / "metrics"))


def test_metrics_need_no_database() -> None:
    text = 'flagstone_cost_requests_total{component="wal",kind="put"} 2000 17\n'
    text += "flagstone_db_uptime_seconds 3600\n"
    done = CliRunner().invoke(app, ["cost", "--metrics", "-", "--json"], input=text)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["dollars"] == pytest.approx(0.01)
    assert found["request_dollars_a_month"] == pytest.approx(7.2)


def test_the_option_has_the_price_lists_of_the_settings() -> None:
    assert tuple(PriceListName) == PRICE_LIST_NAMES
