"""What the oracle takes for possible: it must accept every sound history, and no other."""

from __future__ import annotations

import pytest

from flagstone.testing.simulation.history import Branch, Change, Violation
from flagstone.testing.simulation.oracle import Oracle
from flagstone.types import Row

NOW = (1_000, 1_000)


def reopened_with_an_operand_in_doubt() -> tuple[Oracle, Branch]:
    """A writer found `a;` from a merge whose outcome its predecessor never learned; a load with `b;` waits."""
    oracle = Oracle()
    first = oracle.opened(1, 0)
    oracle.begin(first, [Change("merge", b"m", b"a;")])
    second = oracle.opened(2, 10)
    oracle.audit(second, [Row(b"m", b"a;", 10, None, None)], NOW)
    oracle.begin_load([Change("merge", b"m", b"b;")], 11)
    return oracle, second


@pytest.mark.parametrize("value", [b"a;", b"a;b;"])
def test_a_load_may_extend_an_operand_that_was_in_doubt(value: bytes) -> None:
    # World 500448 with --set trouble=3.0 called the second value impossible.
    oracle, branch = reopened_with_an_operand_in_doubt()
    oracle.expect(branch, b"m", value, (11, 11), NOW)


@pytest.mark.parametrize("value", [b"b;", b"a;c;", b"b;a;b;a;", None])
def test_an_operand_that_a_writer_found_stays(value: bytes | None) -> None:
    oracle, branch = reopened_with_an_operand_in_doubt()
    with pytest.raises(Violation):
        oracle.expect(branch, b"m", value, (11, 11), NOW)
