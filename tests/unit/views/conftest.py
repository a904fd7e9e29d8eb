"""The fixture of these tests."""

from __future__ import annotations

import pytest

from unit.views.views_rig import World


@pytest.fixture
def world() -> World:
    return World()
