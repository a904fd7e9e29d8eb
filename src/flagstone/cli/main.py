"""The command `flagstone`: its global options, its commands, and how it reports errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from flagstone.cli import checkpoints, compaction, databases, garbage, loads, manifests, rows, schemas
from flagstone.cli.context import Invocation
from flagstone.cli.cost import cost
from flagstone.cli.database_command import DatabaseCommand, with_path
from flagstone.cli.explain import explain
from flagstone.cli.parsing import parse_duration
from flagstone.cli.process import BROKEN_PIPE, INTERNAL, INTERRUPTED, end_soon_when_interrupted, exit_code
from flagstone.cli.serve_metrics import serve_metrics
from flagstone.cli.shell import shell
from flagstone.cli.top import top
from flagstone.errors import FlagstoneError, InvalidRequest


class Commands(TyperGroup):
    """The commands. A failure is one line on standard error and an exit code, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except FlagstoneError as error:
            sys.stderr.write(f"flagstone: {error}\n")
            for note in getattr(error, "__notes__", ()):
                sys.stderr.write(f"  {note}\n")
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:
            # The reader closed the pipe. Without this, Python would report unwritten output at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        return result


app: typer.Typer = typer.Typer(
    name="flagstone",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="Read, change and maintain SlateDB databases on object storage.\n\n"
    "Name the database: `flagstone stats s3://bucket/shop`, or `flagstone --path s3://bucket/shop stats`. "
    "Credentials come from the environment or from `--env-file`.",
    epilog="Exit codes: 0 done, 1 not found or declined, 2 bad request, 3 conflict, 4 closed or fenced, "
    "5 store unavailable, 6 damage, 70 internal error, 130 interrupted, 141 output pipe closed.",
)
_PANELS: Final[Mapping[str, Sequence[Callable[..., None]]]] = {
    "Rows": (rows.get, rows.put, rows.delete, rows.scan, rows.diff, explain, shell),
    "State": (
        databases.stats,
        schemas.schema,
        databases.inspect,
        databases.verify,
        databases.repair,
        top,
        serve_metrics,
        cost,
        manifests.read_manifest,
        manifests.list_manifests,
        manifests.seq_to_ts,
        manifests.ts_to_seq,
    ),
    "Checkpoints": (
        checkpoints.create_checkpoint,
        checkpoints.refresh_checkpoint,
        checkpoints.delete_checkpoint,
        checkpoints.list_checkpoints,
    ),
    "Databases": (
        checkpoints.clone,
        checkpoints.union,
        checkpoints.restore,
        databases.delete_db,
        databases.purge_db,
    ),
    "Compaction": (
        compaction.compact,
        compaction.run_compactor,
        compaction.run_worker,
        compaction.read_compactions,
        compaction.list_compactions,
        compaction.read_compaction,
        compaction.submit_compaction,
    ),
    "Bulk loads": (loads.loads,),
    "Garbage": (garbage.run_garbage_collection, garbage.schedule_garbage_collection),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel, cls=DatabaseCommand)(with_path(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from flagstone.kernels import COMPILED

        slow = "" if COMPILED else " (kernels interpreted: install a C compiler, then flagstone again)"
        typer.echo(f"flagstone {version('flagstone')}{slow}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path",
            "-p",
            help="The database: a folder, s3://bucket/db, gs://…, az://…; inside --store if given. Also "
            "FLAGSTONE_PATH. Garbage collection takes several.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(envvar="FLAGSTONE_STORE", help="The object store of the database: a URL or a folder."),
    ] = None,
    wal_store: Annotated[
        str | None,
        typer.Option(envvar="FLAGSTONE_WAL_STORE", help="The object store of the WAL, if it is another one."),
    ] = None,
    store_option: Annotated[
        list[str] | None,
        typer.Option(
            "--store-option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the store, such as endpoint=http://127.0.0.1:9000. Secrets go into the environment. "
            "May be repeated.",
        ),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option("--env-file", "-e", help="Read KEY=VALUE lines (credentials) from this file."),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read the settings from this SlateDb.toml, .json or .yaml."),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            envvar="FLAGSTONE_TIMEOUT",
            metavar="DURATION",
            help="How long to retry a store that does not answer.",
        ),
    ] = "10s",
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON for programs instead of text for people; also after any command."
        ),
    ] = False,
    version: Annotated[  # noqa: ARG001 - the callback prints it
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if env_file is not None:
        load_env_file(env_file)
    # Typer read these variables before the env file was loaded.
    context.obj = Invocation(
        path=path[0] if path else os.environ.get("FLAGSTONE_PATH"),
        path_given=bool(path),
        further_paths=tuple(path[1:]) if path else (),
        store=store or os.environ.get("FLAGSTONE_STORE"),
        wal_store=wal_store or os.environ.get("FLAGSTONE_WAL_STORE"),
        store_options=tuple(store_option or ()),
        settings_file=settings,
        timeout_s=_timeout_s(timeout),
        json=json,
    )


def load_env_file(file: Path) -> None:
    """Put the file's variables into the environment, except those that are already set."""
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


def _timeout_s(text: str) -> float:
    seconds = parse_duration(text).total_seconds()
    if seconds <= 0:
        raise InvalidRequest(f"--timeout is {text!r}; use a duration above zero")
    return seconds


def main() -> None:
    """Run the command line. An error is one line on standard error; FLAGSTONE_TRACEBACK=1 adds the traceback."""
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot show must not make the command fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        end_soon_when_interrupted()
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        # The engine translates a store's errors, so this one concerns standard output or this machine.
        sys.stderr.write(f"flagstone: {error}\n")
        sys.exit(INTERNAL)
    except Exception as error:
        if os.environ.get("FLAGSTONE_TRACEBACK"):
            raise
        sys.stderr.write(
            f"flagstone: {type(error).__name__}: {error}; this is a bug, please report it with what "
            "FLAGSTONE_TRACEBACK=1 shows\n"
        )
        sys.exit(INTERNAL)
