"""What the tests of interleavings share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

FULL = bool(os.environ.get("INTERLEAVINGS_FULL"))
full_only = pytest.mark.skipif(not FULL, reason="part of `make interleavings`")


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """The code under test logs every rejected write, which would be thousands of lines."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
