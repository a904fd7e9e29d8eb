"""The words that `prose.py` finds, and those that it leaves alone."""

from __future__ import annotations

import pytest
from tests.architecture import prose


@pytest.mark.parametrize(
    "line",
    [
        "Nobody reads it.",
        "the rows of whoever began",
        "who comes later waits",
        "The caller is told so.",
        "It is made anew.",
        "The log has no gap.",
        "a log file",
        "every L0 table",
    ],
)
def test_a_word_that_hides_the_actor_or_was_replaced_is_found(line: str) -> None:
    assert prose.WORDS.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "Whole rows are read.",
        "the logger of the WAL writer",
        "a consumer whose position is known",
        "the logs of Spark",
        "for table in tables:",
        "an Arrow table",
    ],
)
def test_an_ordinary_word_is_not_found(line: str) -> None:
    assert not prose.WORDS.search(line)


def test_lines_come_from_every_folder_that_people_read() -> None:
    folders = {path.split("/")[0] for path, _, _ in prose.lines()}

    assert folders >= {
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs",
        "src",
        "tests",
        "examples",
        "bench",
    }
