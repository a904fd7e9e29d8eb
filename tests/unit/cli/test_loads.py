"""The command `loads`: it lists bulk loads and cancels one."""

from __future__ import annotations

import pytest

from flagstone.spark.load.request import begin_load
from kit.spark_loads import address_of, pairs, run_task
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow


def test_loads_are_listed_and_cancelled(shop: Flagstone) -> None:
    assert shop.json("loads") == []
    plan = begin_load(address_of(shop.path))
    run_task(plan, shop.path, [pairs({b"a": b"1"})])

    [found] = shop.json("loads")
    assert (found["id"], found["state"], found["alive"], found["ssts"]) == (
        str(plan.record_id),
        "loading",
        True,
        1,
    )
    assert str(plan.record_id) in shop.ok("loads")

    assert shop.json("loads", "--cancel", str(plan.record_id))["deleted_ssts"] == 1
    [found] = shop.json("loads")
    assert (found["state"], found["reason"], found["ssts"]) == ("refused", "cancelled", 0)
