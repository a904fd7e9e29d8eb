"""Runs the command line in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from flagstone.cli.main import app


class Flagstone:
    """`cli("scan", "--limit", "2")` runs the command on one database and returns its result."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *arguments: str, stdin: bytes | None = None, path: str | Path | None = None) -> Result:
        """Run the command; it may fail."""
        return CliRunner().invoke(app, ["--path", str(path or self.path), *arguments], input=stdin)

    def ok(self, *arguments: str, stdin: bytes | None = None, path: str | Path | None = None) -> str:
        """The output of a command that must succeed."""
        done = self(*arguments, stdin=stdin, path=path)
        assert done.exit_code == 0, f"{arguments}: exit {done.exit_code}: {done.stderr} {done.exception}"
        return done.stdout

    def json(self, *arguments: str, path: str | Path | None = None) -> Any:
        """The JSON output of a command that must succeed."""
        return json.loads(self.ok(*arguments, "--json", path=path))

    def refused(self, *arguments: str, code: int = 2, path: str | Path | None = None) -> str:
        """The one line on standard error of a command that must fail with this code."""
        done = self(*arguments, path=path)
        assert done.exit_code == code, f"{arguments}: exit {done.exit_code}: {done.stderr} {done.exception}"
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return str(done.stderr)
