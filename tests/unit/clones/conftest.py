"""The fixture of the tests of clones: an empty store."""

from __future__ import annotations

import pytest

from kit.databases import World


@pytest.fixture
def world() -> World:
    return World()
