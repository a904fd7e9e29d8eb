from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flagstone.runtime import metric_names

pytest.importorskip("slatedb", reason="the official wheel is the judge here")


@pytest.mark.slow
def test_every_metric_of_the_official_wheel_has_its_name_in_our_list(tmp_path: Path) -> None:
    script = Path(__file__).with_name("wheel_metrics.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    listed = set(run.stdout.split())

    assert len(listed) > 50
    assert listed <= metric_names.SLATEDB_NAMES


def test_no_two_metric_constants_have_the_same_name() -> None:
    values = [
        value for name, value in vars(metric_names).items() if isinstance(value, str) and name.isupper()
    ]

    listed = metric_names.SLATEDB_NAMES | metric_names.FLAGSTONE_NAMES
    assert len(values) == len(set(values)) == len(listed)
