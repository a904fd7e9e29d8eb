"""Settings of every test run. Fixtures are in `tests/kit` and `tests/servers`; a server starts with its first use."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

# Test modules are imported by path, so the folder of shared test code must be on the import path.
sys.path.insert(0, str(Path(__file__).parent))

# A shell starts its background jobs with Ctrl-C ignored, and the programs that tests start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["servers.plugin", "kit.fixtures"]

# `quick`, `long`, `fuzz` and `model` are for the make targets of these names; the others are for everyday work and
# for `make test`.
for profile, examples in (
    ("quick", 15),
    ("dev", 50),
    ("ci", 50),
    ("long", 200),
    ("fuzz", 10_000),
    ("model", 2_000),
):
    settings.register_profile(profile, max_examples=examples, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
