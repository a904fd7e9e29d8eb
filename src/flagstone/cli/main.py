"""The command `flagstone`: global options, commands, and errors as one line and an exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flagstone.cli import verification
from flagstone.cli.context import Invocation
from flagstone.cli.exit_codes import exit_code
from flagstone.errors import FlagstoneError, InvalidRequest

app = typer.Typer(
    name="flagstone",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="SlateDB databases on object storage: look at them, check them, maintain them.",
    epilog="Exit codes: 0 done, 2 bad request, 3 conflict, 4 closed or fenced, 5 store unavailable, 6 damage, "
    "70 internal error.",
)
app.command()(verification.verify)


@app.callback()
def options(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Option(
            "--path", "-p", help="The database: a folder, s3://bucket/db, …; inside --store if given."
        ),
    ],
    store: Annotated[
        str | None, typer.Option(help="The object store that holds it, as a URL or a folder.")
    ] = None,
    wal_store: Annotated[
        str | None, typer.Option(help="The store of its log, when that is another one.")
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option("--env-file", "-e", help="Read KEY=VALUE lines (credentials) from this file."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
    ] = False,
) -> None:
    """Options that every command takes, before its name."""
    if env_file is not None:
        load_env_file(env_file)
    context.obj = Invocation(path, store, wal_store, json)


def load_env_file(file: Path) -> None:
    """Put the file's variables into the environment; those already set win."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InvalidRequest(f"cannot read the env file {file}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().replace(".", "_").isidentifier():
            raise InvalidRequest(f"{file} line {number} is not KEY=VALUE")
        os.environ.setdefault(name.strip(), value.strip().strip("\"'"))


def main() -> None:
    """Run the command line; an expected error is one line on standard error, never a traceback."""
    try:
        app()
    except FlagstoneError as error:
        sys.stderr.write(f"flagstone: {error}\n")
        for note in getattr(error, "__notes__", ()):
            sys.stderr.write(f"  {note}\n")
        sys.exit(exit_code(error))
