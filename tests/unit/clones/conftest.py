"""The fixture of these tests."""

from __future__ import annotations

import pytest

from unit.clones.clones_rig import World


@pytest.fixture
def world() -> World:
    return World()
