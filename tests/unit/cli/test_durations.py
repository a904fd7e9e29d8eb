"""Durations on the command line have a unit; a bare number is refused with a hint."""

from __future__ import annotations

import pytest

from unit.cli.running import Flagstone

ID = "01740ee5-6459-44af-9a45-85deb6e468e3"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("put", "k", "v", "--ttl", "{}"),
        ("create-checkpoint", "--lifetime", "{}"),
        ("refresh-checkpoint", "--id", ID, "--lifetime", "{}"),
        ("run-garbage-collection", "--min-age", "{}"),
        ("schedule-garbage-collection", "--manifest", "min_age={},period=1min"),
        ("schedule-garbage-collection", "--wal", "min_age=1min,period={}"),
        ("delete-db", "--soft", "--grace", "{}"),
        ("compact", "--deadline", "{}"),
        ("compact", "--patience", "{}"),
        ("--timeout", "{}", "stats"),
    ],
    ids=" ".join,
)
def test_a_number_without_a_unit_is_refused(shop: Flagstone, arguments: tuple[str, ...]) -> None:
    for number in ("0", "30", "5 "):
        error = shop.refused(*(argument.format(number) for argument in arguments))
        assert "has no unit; write it like 100ms, 5s" in error, error
    assert "not a duration" in shop.refused(*(argument.format("soon") for argument in arguments))
