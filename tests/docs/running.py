"""Runs a page: its blocks in order, in one namespace and one folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from docs.code_blocks import FILES, Block, Page, commands, located

PATIENCE_S = 120
SCRIPTS = Path(sys.executable).parent
PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}


PLAIN_COMMAND = re.compile(r"(?:\.venv/bin/)?flagstone [^|<>;&$`*?#]*\Z")
"""A `flagstone` command without shell syntax."""


class BlockFailed(AssertionError):
    """A block did not behave as the page says; the message has its position and its output."""


def run_page(page: Page, folder: Path, namespace: dict[str, Any]) -> None:
    """Run every block of the page in `folder`, which is the current one; raises `BlockFailed` at the first failure."""
    (folder / "tmp").mkdir()
    # Pages use `.venv/bin/flagstone`, as in a checkout.
    (folder / ".venv").symlink_to(Path(sys.prefix))
    printed = ""
    try:
        for block in page.blocks:
            if block.language in FILES:
                _place_file(block, folder)
            elif block.title == "Output":
                _check(printed.strip() == block.code.strip(), block, "the block before printed", printed)
            elif block.runs:
                code = located(block.code, folder, buckets=not page.on_s3)
                printed = (
                    _run_python(block, code, namespace)
                    if block.language == "python"
                    else _run_shell(block, code, folder)
                )
    finally:
        _close_all(namespace)


def _run_python(block: Block, code: str, namespace: dict[str, Any]) -> str:
    # The blank lines in front make tracebacks show the line numbers of the page.
    # Without `annotations` from this file's own future: a page would have to import it.
    program = compile("\n" * block.line + code, str(block.page), "exec", dont_inherit=True)
    out = io.StringIO()
    ended: BaseException | None = None
    try:
        with contextlib.redirect_stdout(out):
            exec(program, namespace)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - a page may raise anything; reported below
        ended = error
    if (None if ended is None else type(ended).__name__) != block.ends_with:
        story = "".join(traceback.format_exception(ended)) if ended else f"no {block.ends_with} came"
        raise BlockFailed(f"{block.position}\n{code}\nprinted: {out.getvalue()}\n{story}") from ended
    return out.getvalue()


def _run_shell(block: Block, code: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    if block.services:
        return _run_services(block, code, folder, environment)
    lines = list(commands(code))
    if all(PLAIN_COMMAND.match(line) for line in lines):
        return "".join(_run_command(block, line) for line in lines)
    done = subprocess.run(
        [shutil.which("bash") or "sh", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    _check(done.returncode == 0, block, f"exit code {done.returncode}", done.stdout + done.stderr)
    return done.stdout


def _run_command(block: Block, line: str) -> str:
    """Run one `flagstone` command in this process, because starting Python takes most of the time."""
    from flagstone.cli.main import app

    done = CliRunner().invoke(app, shlex.split(line)[1:])
    _check(done.exit_code == 0, block, f"{line!r} ended with {done.exit_code}", done.output)
    return done.stdout


def _run_services(block: Block, code: str, folder: Path, environment: dict[str, str]) -> str:
    """Start all services, wait until each has started, send each a signal; each must end without error."""
    lines = list(commands(code))
    running = [
        subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        for line in lines
    ]
    started = []
    try:
        for process in running:
            assert process.stderr is not None
            started.append(next((line for line in process.stderr if "started" in line), "nothing"))
            process.send_signal(signal.SIGTERM)
        for line, process in zip(lines, running, strict=True):
            _, words = process.communicate(timeout=PATIENCE_S)
            _check(process.returncode == 0, block, f"{line!r} ended with {process.returncode}", words)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    _check("nothing" not in started, block, "a service did not start", "".join(started))
    return ""


def _place_file(block: Block, folder: Path) -> None:
    try:
        PARSERS[block.language](block.code)
    except ValueError as error:
        raise BlockFailed(f"{block.position} is not {block.language}: {error}") from error
    if block.title:
        (folder / block.title).write_text(block.code, encoding="utf-8")


def _check(ok: bool, block: Block, what: str, printed: str) -> None:
    if not ok:
        raise BlockFailed(f"{block.position}\n{block.code}\n{what}:\n{printed}")


def _close_all(namespace: dict[str, Any]) -> None:
    """Close everything that a page leaves open, because it would disturb the next page."""
    if "spark" in namespace:
        for query in namespace["spark"].streams.active:
            query.stop()
    for value in list(namespace.values()):
        if type(value).__module__.startswith("flagstone.") and hasattr(value, "close"):
            value.close()
