"""The global options of a call, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flagstone.cli.connection import Connection
    from flagstone.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """The global options of one call."""

    path: str | None = None
    path_given: bool = False
    """Whether the call names `path`, and not the environment."""
    further_paths: tuple[str, ...] = ()
    store: str | None = None
    wal_store: str | None = None
    store_options: tuple[str, ...] = ()
    settings_file: str | None = None
    timeout_s: float = 10.0
    json: bool = False

    def require_path(self) -> str:
        """The database of the call. Not checked earlier, because `--help` of a command needs no database."""
        self.require_paths()
        if len(self.paths) > 1:
            raise InvalidRequest(
                f"--path names {len(self.paths)} databases; only garbage collection and serve-metrics take more "
                "than one"
            )
        return self.paths[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """All databases of the call."""
        return (*((self.path,) if self.path else ()), *self.further_paths)

    def require_paths(self) -> None:
        """Raise `InvalidRequest` if the call names no database."""
        if not self.paths:
            raise InvalidRequest(
                "no database given; name it before the command or after it: flagstone --path s3://bucket/db COMMAND, "
                "flagstone COMMAND s3://bucket/db (or set FLAGSTONE_PATH)"
            )

    def each(self) -> list[Invocation]:
        """The same call for each database alone."""
        return [replace(self, path=path, further_paths=()) for path in self.paths]

    def connect(self, *, long_work: bool = False) -> Connection:
        """The stores of the database; see `connection.connect`."""
        # Only commands that use the engine import it, so that `--help` and completion are quick.
        from flagstone.cli.connection import connect

        return connect(self, long_work=long_work)

    def settings(self) -> Settings:
        """The settings of the `--settings` file, or the defaults."""
        from flagstone.config import Settings

        return Settings() if self.settings_file is None else Settings.from_file(self.settings_file)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
"""An option of every command; it may also be given before the command."""


def invocation(context: typer.Context, *, json: bool) -> Invocation:
    """The global options of a command; `json` is the command's own option."""
    found = context.obj
    assert isinstance(found, Invocation)
    return replace(found, json=found.json or json)


OnSpark = Annotated[
    bool,
    typer.Option("--spark", help="Do the work on Spark: on all local cores, or as --spark-conf says."),
]
SparkConf = Annotated[
    list[str] | None,
    typer.Option(
        "--spark-conf",
        metavar="NAME=VALUE",
        help="With --spark: a setting, such as spark.master=spark://host:7077. May be repeated.",
    ),
]

_DEFAULTS: Final = {"spark.log.level": "ERROR"}


def parse_conf(texts: Sequence[str] | None, *, spark: bool) -> dict[str, str]:
    """The Spark settings by name.

    Raises:
        InvalidRequest: a setting is not NAME=VALUE, or `--spark` is not given.

    """
    if texts and not spark:
        raise InvalidRequest("--spark-conf works only with --spark; add --spark")
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise InvalidRequest(f"--spark-conf {text!r} is not NAME=VALUE, such as spark.driver.memory=4g")
        found[name] = value
    return found


@contextmanager
def spark_session(conf: dict[str, str], *, command: str) -> Iterator[SparkSession]:
    """A Spark session that ends with the block. Ctrl-C while it starts ends the process and Spark.

    Raises:
        InvalidRequest: PySpark or Java is not installed.

    """
    from flagstone.spark import session

    spark = session(**{"app_name": f"flagstone {command}", **_DEFAULTS, **conf})
    try:
        yield spark
    finally:
        from flagstone.spark.job_control import session_ended

        if not session_ended(spark):
            spark.stop()


def spark_arguments(call: Invocation) -> dict[str, Any]:
    """The database of a call as arguments for the functions of `flagstone.spark`.

    Executors open the store themselves. Credentials in the environment of this process reach only the executors of a
    local session.
    """
    from flagstone.cli.connection import address, store_options

    path, store = address(call, call.require_path())
    return {"url": path, "store": store, "store_options": dict(store_options(call, store or path))}
