"""Act 2: a service opens what Spark has loaded: point reads, writes, transactions, scans."""

from __future__ import annotations

import json
import time

import flagstone
from shop import Shop, compact_json, customer_key, customer_value, order_value
from stage import Stage

DURABLE_PUTS = 200


def serve(stage: Stage, db: flagstone.Db, shop: Shop) -> None:
    stage.act("2 Serve", "a Python process reads and writes the same database")
    reads = min(shop.orders, 20_000)
    numbers = [at * shop.orders // reads for at in range(reads)]
    keys = [shop.order_key(number) for number in numbers]
    expected = [
        None if (state := shop.state_of(number)) is None else order_value(number, state) for number in numbers
    ]
    for name in ("point reads, from the store", "point reads, from memory"):
        with stage.step(name, rows=reads):
            found = [db.get(key) for key in keys]
        stage.check(name, found, expected)

    # A put returns at memory speed; the flush at the end waits until all of them are durable.
    fresh = range(shop.orders, shop.orders + new_orders(shop))
    with stage.step("puts, durable in the end", rows=len(fresh)) as (_, reached):
        for done, number in enumerate(fresh):
            db.put(shop.order_key(number), order_value(number, "new"))
            if done % 5000 == 0:
                reached(done)
        db.flush("wal")
    with stage.step("durable puts, one by one", rows=DURABLE_PUTS) as (_, reached):
        for done, number in enumerate(fresh[:DURABLE_PUTS]):
            db.put(shop.order_key(number), order_value(number, "new"), await_durable=True)
            reached(done)

    _award_points(stage, db, shop)

    favourite = shop.order_key(0).rpartition(b"/")[0] + b"/"
    theirs = [number for number in range(fresh.stop) if shop.customer_of(number) == 0]
    kept = [number for number in theirs if number >= shop.orders or shop.state_of(number) is not None]
    with stage.step("scan of one customer's orders") as (lap, _):
        orders = [json.loads(value) for _, value in db.scan(prefix=favourite)]
        lap.rows = len(orders)
    stage.check("orders of the first customer", len(orders), len(kept))
    with stage.step("scan of everything as Arrow") as (lap, _):
        lap.rows = sum(batch.num_rows for batch in db.scan_arrow())
    stage.check("rows", lap.rows, shop.loaded_rows - shop.changes()[1] + len(fresh))


def new_orders(shop: Shop) -> int:
    """How many orders the service takes."""
    return max(1000, shop.orders // 20)


def _award_points(stage: Stage, db: flagstone.Db, shop: Shop) -> None:
    """Transactions: the points of a customer change together with an entry in the ledger, or not at all."""
    rounds = min(2000, shop.customers)

    def add_point(customer: int) -> None:
        with db.transaction() as transaction:
            found = transaction.get(customer_key(customer))
            assert found is not None
            fields = json.loads(found)
            fields["points"] += 1
            transaction.put(customer_key(customer), compact_json(fields))
            transaction.put(b"ledger/%07d/%06d" % (customer, fields["points"]), b"+1")

    with stage.step("transactions", rows=rounds) as (_, reached):
        for customer in range(rounds):
            add_point(customer)
            if customer % 100 == 0:
                reached(customer)
    stage.check("points", db.get(customer_key(rounds - 1)), customer_value(rounds - 1, 1))

    # Two at once on the same customer: the second commit raises TransactionConflict and is run again.
    slow = db.transaction()
    stage.check("points before", slow.get(customer_key(0)), customer_value(0, 1))
    add_point(0)
    slow.put(customer_key(0), customer_value(0, 99))
    try:
        slow.commit()
    except flagstone.TransactionConflict:
        add_point(0)
    stage.check("points after a conflict", db.get(customer_key(0)), customer_value(0, 3))

    # Delete the ledger, so that the totals at the end are those of orders and customers.
    for key, _ in db.scan(prefix=b"ledger/"):
        db.delete(key)
    session = b"session/of-a-moment"
    db.put(session, b"gone soon", ttl="50ms")
    time.sleep(0.06)
    stage.check("a row whose time to live has passed", db.get(session), None)
    stage.tell("A conflicting transaction raised TransactionConflict and was run again: no update was lost.")
