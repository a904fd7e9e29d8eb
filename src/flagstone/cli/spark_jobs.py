"""`--spark`: the work of a command done by Spark, in a session that the command starts and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.cli.context import Invocation
from flagstone.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OnSpark = Annotated[
    bool,
    typer.Option("--spark", help="Have Spark do the work: on all cores here, or where --spark-conf says."),
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
    """The settings as given, by name.

    Raises:
        InvalidRequest: one is not NAME=VALUE, or there is no --spark that they could be for.

    """
    if texts and not spark:
        raise InvalidRequest("--spark-conf is for --spark; give that, too")
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise InvalidRequest(f"--spark-conf {text!r} is not NAME=VALUE, such as spark.driver.memory=4g")
        found[name] = value
    return found


@contextmanager
def spark_session(conf: dict[str, str], *, command: str) -> Iterator[SparkSession]:
    """A session that ends with the block. Ctrl-C while it starts ends the process, and Spark with it.

    Raises:
        InvalidRequest: PySpark is not installed, or there is no Java for it.

    """
    from flagstone.spark import session

    spark = session(**{"app_name": f"flagstone {command}", **_DEFAULTS, **conf})
    try:
        yield spark
    finally:
        from flagstone.spark.progress import session_ended

        if not session_ended(spark):
            spark.stop()


def spark_arguments(call: Invocation) -> dict[str, Any]:
    """The database of a call as the functions of `flagstone.spark` take it.

    Executors open the store themselves: credentials in the environment of this process reach those of a local session,
    and no others.
    """
    from flagstone.cli.connection import address, store_options

    path, store = address(call, call.require_path())
    return {"url": path, "store": store, "store_options": dict(store_options(call, store or path))}
