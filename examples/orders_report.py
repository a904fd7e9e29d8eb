"""Typed rows, a secondary index, and reports by DuckDB and Polars on the live database.

    python examples/orders_report.py

A service writes orders as objects. The index by customer changes in the same transaction as the order. Reports read one
moment of the database, while the service goes on writing, and read only the key ranges and columns that they need.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import duckdb
import polars as pl

import flagstone
from flagstone import keys

REGIONS = ("asia", "eu", "us")
FIRST_DAY = date(2026, 1, 1)


@dataclass
class Order:
    customer: str
    day: date
    cents: int


def main(folder: Path) -> None:
    with flagstone.open(folder / "shop") as db:
        orders = db.collection("orders", key=(str, int), value=Order)
        by_customer = orders.index("by_customer", lambda order: order.customer)
        for number in range(3000):
            day = FIRST_DAY + timedelta(days=number % 90)
            orders[REGIONS[number % 3], number] = Order(f"customer-{number % 50}", day, number % 997 + 100)

        # The index: the orders of one customer, without reading the others.
        mine = list(by_customer.scan("customer-7"))
        print(f"customer-7 has {len(mine)} orders; the first is {mine[0][0]}")
        assert len(mine) == 60
        db.flush()

        # A report, of one moment: an order that comes meanwhile is not in it.
        orders_only = keys.encode("orders")
        with flagstone.dataset(folder / "shop", prefix=orders_only) as shop:  # noqa: F841 - DuckDB finds it by its name
            orders["eu", 9999] = Order("customer-7", FIRST_DAY, 1)
            report = duckdb.sql("select key1 as region, count(*), sum(cents) from shop group by 1 order by 1")
            rows = report.fetchall()
        assert [region for region, *_ in rows] == list(REGIONS)
        assert sum(count for _, count, _ in rows) == 3000
        db.flush("wal")
        frame = flagstone.scan_polars(folder / "shop", prefix=orders_only)
        assert frame.select(pl.len()).collect().item() == 3001
        print("the reports agree with the service")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
