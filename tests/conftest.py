"""What every test may use. The servers live in `tests/servers` and start when a test first asks for one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

# Test modules are imported by path, so shared test code needs a place on the import path.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["servers.plugin"]

# `fuzz` is what `make fuzz` runs and `model` what `make model` does; the others are for everyday work and for
# `make test`.
for profile, examples in (("dev", 50), ("ci", 200), ("fuzz", 10_000), ("model", 2_000)):
    settings.register_profile(profile, max_examples=examples, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
