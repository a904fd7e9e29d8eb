"""The search for the end of the WAL, with gaps anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flagstone.wal.frontier import FrontierSearch, apply_answers, plan_probes


def run(present: set[int], replay_after: int, expected: int, width: int) -> tuple[int, int]:
    """The end that the search finds, and how many probes it took."""
    search = FrontierSearch(replay_after, expected=expected)
    probes = 0
    while not search.done:
        asked = plan_probes(search, width=width)
        assert asked == sorted(set(asked))
        assert all(wal_id > search.present for wal_id in asked)
        assert search.absent is None or all(wal_id < search.absent for wal_id in asked)
        probes += len(asked)
        search = apply_answers(search, {wal_id: wal_id in present for wal_id in asked})
    assert plan_probes(search, width=width) == []
    return search.present, probes


@given(
    replay_after=st.integers(0, 2**40),
    files=st.one_of(st.integers(0, 5), st.integers(0, 5000)),
    expected=st.integers(-20, 6000),
    width=st.integers(1, 8),
)
def test_the_end_of_a_wal_without_gaps_is_found_in_logarithmic_time(
    replay_after: int, files: int, expected: int, width: int
) -> None:
    present = set(range(replay_after + 1, replay_after + files + 1))

    found, probes = run(present, replay_after, max(0, replay_after + expected), width)

    assert found == replay_after + files
    # Each step of the search at least halves what is unknown and costs at most one round.
    distance = max(files, expected, 1)
    assert probes <= (width + 1) * (2 * distance.bit_length() + 3)


@given(
    present=st.sets(st.integers(1, 200), max_size=150),
    replay_after=st.integers(0, 100),
    expected=st.integers(0, 200),
    width=st.integers(1, 8),
)
def test_in_a_wal_with_gaps_the_search_ends_at_a_file_without_successor(
    present: set[int], replay_after: int, expected: int, width: int
) -> None:
    found, _ = run(present, replay_after, expected, width)

    assert found == replay_after or found in present
    assert found + 1 not in present
