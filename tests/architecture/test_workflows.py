"""The workflows of the public repository are thin: each command is a make target, and rights are granted one by one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

if not WORKFLOWS:
    pytest.skip("a source distribution has no workflows", allow_module_level=True)

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def commands(job: dict[str, Any]) -> list[str]:
    """What the steps of a job run, once for each value of a matrix that the commands use."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = [step["run"] for step in job.get("steps", []) if "run" in step]
    for name, values in matrix.items():
        place = f"${{{{ matrix.{name} }}}}"
        found = [
            command.replace(place, str(value))
            for command in found
            for value in (values if place in command else [""])
        ]
    return found


@every_workflow
def test_each_command_of_a_workflow_is_a_make_target(path: Path) -> None:
    used = [command for job in load(path)["jobs"].values() for command in commands(job)]

    assert [command for command in used if command.removeprefix("make ") not in TARGETS] == []


@every_workflow
def test_a_workflow_may_only_read_unless_a_job_asks_for_more(path: Path) -> None:
    assert load(path)["permissions"] == {"contents": "read"}


@every_workflow
def test_each_job_has_a_time_limit(path: Path) -> None:
    jobs = load(path)["jobs"]

    assert [name for name, job in jobs.items() if "steps" in job and "timeout-minutes" not in job] == []


def test_the_nightly_workflow_runs_every_long_target() -> None:
    nightly = load(PROJECT / ".github" / "workflows" / "nightly.yml")
    limited = re.findall(
        r"^([a-z-]+): setup.*\n(?:\t.*\n)*?\t.*\btimeout \d", (PROJECT / "Makefile").read_text(), re.MULTILINE
    )

    assert set(nightly["jobs"]["long"]["strategy"]["matrix"]["target"]) == set(limited)
