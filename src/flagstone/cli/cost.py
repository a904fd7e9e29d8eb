"""`cost`: what a database costs a month."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_facts, print_json, print_line, print_table, working
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text

if TYPE_CHECKING:
    from flagstone.runtime.metrics import Labels
    from flagstone.store.cost import Cost


class PriceListName(StrEnum):
    s3_standard = "s3-standard"
    s3_express = "s3-express"
    gcs_standard = "gcs-standard"
    r2_standard = "r2-standard"
    free = "free"


IDLE_GETS_A_MINUTE: Final = 12
"""What an open database with default settings sends while no row is written, as `bench/latency.py` counts it."""

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def cost(
    context: typer.Context,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Metrics of the process that uses the database, the text of db.metrics_text(); - is standard input.",
        ),
    ] = None,
    price_list: Annotated[
        PriceListName, typer.Option("--price-list", help="Whose list prices.")
    ] = PriceListName.s3_standard,
    json: AsJson = False,
) -> None:
    """Show what a database costs a month: storage, and requests of a process that uses it.

    Without --metrics it lists the objects, and estimates what an idle writer adds. What a running process sends is
    known in that process only: with --metrics it tells requests, bytes and dollars by purpose, a month at the same
    rate, and per million operations; then it sends no request.

    For example:

        flagstone -p s3://bucket/shop cost
        curl -s http://127.0.0.1:8000/metrics | flagstone cost --metrics - --price-list s3-express
    """
    call = invocation(context, json=json)
    if metrics is None:
        _print_closed(call, str(price_list))
        return
    from flagstone.store.cost import Usage, plan_cost

    usage = Usage.of_samples(_samples(_read(metrics)))
    if not usage.requests:
        raise InvalidRequest(
            f"{metrics} has no sample of flagstone_cost_requests_total; give the text of db.metrics_text()"
        )
    _print_running(call, plan_cost(usage, str(price_list)))


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"cannot read the metrics in {file}: {error}") from None


def _samples(text: str) -> Iterator[tuple[str, Labels, float]]:
    """The samples of the text that tell the usage, under the names that the metrics have in Flagstone."""
    from flagstone.store.cost import USAGE_NAMES

    known = {}
    for name in USAGE_NAMES:
        plain = name.replace(".", "_")
        known[plain] = known[f"{plain}_total"] = name
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None or found[1] not in known:
            continue
        try:
            value = float(found[3])
        except ValueError:
            raise InvalidRequest(f"the metrics have a sample that is not a number: {line!r}") from None
        yield known[found[1]], tuple(_LABEL.findall(found[2] or "")), value


def _print_closed(call: Invocation, price_list: str) -> None:
    from flagstone.store.prices import GIGABYTE, PRICE_LISTS, SECONDS_A_MONTH

    connection = call.connect()
    if connection.admin().manifest() is None:
        raise InvalidRequest(f"no database at {connection.root!r} in {connection.store.url}; check the path")
    with working("listing", connection):
        stored = connection.stored_bytes()
    prices = PRICE_LISTS[price_list]
    storage = prices.stored_gb * stored / GIGABYTE
    gets = round(IDLE_GETS_A_MINUTE * SECONDS_A_MONTH / 60)
    idle = prices.requests({"get": gets})
    if call.json:
        facts: dict[str, Any] = {
            "price_list": price_list,
            "stored_bytes": stored,
            "storage_dollars_a_month": storage,
            "idle_requests_a_month": {"get": gets},
            "idle_dollars_a_month": idle,
            "dollars_a_month": storage + idle,
        }
        print_json(facts)
        return
    print_facts(
        [
            ("stored", f"{size_text(stored)}, {_dollars(storage)} a month"),
            ("an idle writer", f"{gets:,} gets, {_dollars(idle)} a month, with default settings"),
            ("together", f"{_dollars(storage + idle)} a month"),
            ("prices", price_list),
        ],
        title=f"{connection.root} in {connection.store.url}",
    )


def _print_running(call: Invocation, found: Cost) -> None:
    if call.json:
        print_json(found.to_dict())
        return
    usage = found.usage
    rows = [
        (
            name,
            sum(usage.requests.get(name, {}).values()),
            ", ".join(f"{count:,} {kind}" for kind, count in sorted(usage.requests.get(name, {}).items())),
            size_text(usage.sent.get(name, 0)),
            size_text(usage.received.get(name, 0)),
            _dollars(dollars),
        )
        for name, dollars in sorted(found.by_component.items(), key=lambda item: -item[1])
    ]
    print_table(("purpose", "requests", "kinds", "sent", "received", "dollars"), rows, empty="no requests")
    print_line("")
    month = found.dollars_a_month
    per_million = found.per_million_operations
    print_facts(
        [
            ("so far", f"{_dollars(found.dollars)} in {usage.seconds:,.0f} s"),
            ("storage", f"{size_text(usage.stored_bytes)} live, {_dollars(found.storage_a_month)} a month"),
            (
                "a month",
                "unknown: too little was counted" if month is None else f"{_dollars(month)} at this rate",
            ),
            ("a million operations", None if per_million is None else _dollars(per_million)),
            ("prices", found.price_list),
        ]
    )


def _dollars(amount: float) -> str:
    """Dollars with cents, and small amounts with two digits that count."""
    return f"${amount:,.2f}" if amount >= 1 or not amount else f"${amount:.2g}"
