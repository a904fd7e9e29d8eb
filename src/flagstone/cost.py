"""What a database costs: requests and bytes by purpose, and dollars at a list of prices.

`db.status()["cost"]` has it for an open database. For other prices, or for numbers of your own:

plan_cost(usage, "s3-standard")    the `Cost` of a `Usage`
Usage.of(metrics)                  the usage that metrics tell
PRICE_LISTS                        the `Prices` by name
"""

from __future__ import annotations

from flagstone.store.cost import COMPONENTS, Cost, Usage, plan_cost
from flagstone.store.prices import PRICE_LISTS, Prices

__all__ = ["COMPONENTS", "Cost", "PRICE_LISTS", "Prices", "Usage", "plan_cost"]  # noqa: RUF022 - as `sorted` does
