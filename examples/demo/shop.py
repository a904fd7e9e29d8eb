"""The shop: a generated data set, and a model in plain Python that gives the expected result.

Orders have customers, and the customers are skewed: the first one has about two orders in a hundred. The first
load adds all orders as "paid". The second adds what happened since: every fifth order was packed and then shipped,
and every 33rd was cancelled. Nothing is random, so every row of the result is known.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS_PER_CUSTOMER = 10


def compact_json(fields: dict[str, Any]) -> bytes:
    """The bytes that Spark's `to_json` makes of the same fields."""
    return json.dumps(fields, separators=(",", ":")).encode()


def customer_key(customer: int) -> bytes:
    return b"customer/%07d" % customer


def customer_value(customer: int, points: int = 0) -> bytes:
    return compact_json({"name": f"Customer {customer}", "points": points})


def order_value(number: int, state: str) -> bytes:
    return compact_json({"cents": cents_of(number), "state": state})


def cents_of(number: int) -> int:
    return 500 + number * 37 % 99_991


@dataclass(frozen=True)
class Shop:
    """The model of a shop with `orders` orders: its keys, values and totals."""

    orders: int

    @property
    def customers(self) -> int:
        return max(10, self.orders // ORDERS_PER_CUSTOMER)

    @property
    def loaded_rows(self) -> int:
        return self.orders + self.customers

    def customer_of(self, number: int) -> int:
        """Cubing numbers between 0 and 1 moves them towards 0: that makes the skew."""
        u = number * 2_654_435_761 % 2**20
        return (u**3 >> 20) * self.customers >> 40

    def order_key(self, number: int) -> bytes:
        return b"order/%07d/%010d" % (self.customer_of(number), number)

    def state_of(self, number: int) -> str | None:
        """After both loads; None for a cancelled order, which is deleted."""
        if number % 33 == 7:
            return None
        return "shipped" if number % 5 == 0 else "paid"

    def changes(self) -> tuple[int, int]:
        """How many orders the second load changes, and how many of these it deletes."""
        deleted = sum(number % 33 == 7 for number in range(self.orders))
        both = sum(number % 33 == 7 for number in range(0, self.orders, 5))
        return len(range(0, self.orders, 5)) + deleted - both, deleted

    def totals(self) -> tuple[Counter[str], Counter[str]]:
        """Orders and cents by state after both loads."""
        count: Counter[str] = Counter()
        cents: Counter[str] = Counter()
        for number in range(self.orders):
            state = self.state_of(number)
            if state is not None:
                count[state] += 1
                cents[state] += cents_of(number)
        return count, cents

    # -- the same in Spark: the model's formulas as SQL ---------------------------------------------------

    def history(self, spark: SparkSession) -> DataFrame:
        """All customers, and all orders as first placed."""
        customers = spark.range(self.customers).selectExpr(
            "concat('customer/', lpad(id, 7, '0')) as key",
            "to_json(named_struct('name', concat('Customer ', id), 'points', 0)) as value",
        )
        return customers.unionByName(self._orders(spark.range(self.orders), "'paid'").select("key", "value"))

    def day(self, spark: SparkSession) -> DataFrame:
        """What happened since, with several rows for some orders: the highest `version` is the last."""
        numbers = spark.range(self.orders)
        fifth = numbers.where("id % 5 = 0")
        packed = self._orders(fifth, "'packed'").selectExpr("*", "'put' as op", "1 as version")
        shipped = self._orders(fifth, "'shipped'").selectExpr("*", "'put' as op", "2 as version")
        cancelled = self._orders(numbers.where("id % 33 = 7"), "'cancelled'").selectExpr(
            "*", "'delete' as op", "3 as version"
        )
        return packed.unionByName(shipped).unionByName(cancelled)

    def _orders(self, numbers: DataFrame, state: str) -> DataFrame:
        skewed = f"shiftright(shiftright(u * u * u, 20) * {self.customers}, 40)"
        return numbers.selectExpr("id", "id * 2654435761 % 1048576 as u").selectExpr(
            f"concat('order/', lpad({skewed}, 7, '0'), '/', lpad(id, 10, '0')) as key",
            f"to_json(named_struct('cents', 500 + id * 37 % 99991, 'state', {state})) as value",
        )
