"""The examples as modules, and the one Spark session that all tests of a process share."""

from __future__ import annotations

import sys
from pathlib import Path

from spark.conftest import spark  # noqa: F401 - a fixture

EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path.append(str(EXAMPLES))
