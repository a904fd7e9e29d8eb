"""`view`: a temporary view that shows the newest state of a database, and is moved to a newer one on request."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from flagstone.spark.frames.plan import ReadArguments
from flagstone.spark.frames.read import read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class RefreshableView:
    """A temporary view of a database. Queries that are running when it moves end with the state they began with."""

    name: str
    _spark: Any
    _url: str
    _arguments: ReadArguments = field(repr=False)  # credentials may be among them
    _shown: list[Any] = field(default_factory=list, repr=False)

    def refresh(self) -> None:
        """Show the newest state. If this fails, the view stays as it is."""
        frame = read(self._spark, self._url, **self._arguments)
        frame.createOrReplaceTempView(self.name)
        self._shown[:] = [frame]

    def drop(self) -> None:
        """Remove the view. Its checkpoint is deleted when no query uses it any more."""
        self._spark.catalog.dropTempView(self.name)
        self._shown.clear()


def view(
    spark: SparkSession, name: str, url: str | os.PathLike[str], **arguments: Unpack[ReadArguments]
) -> RefreshableView:
    """Create or replace the temporary view `name` of a database, with the arguments of `read`.

    It shows the state of this call until `refresh()` moves it to the newest one: Spark plans a view once, so a view
    cannot follow a database by itself. The former state is released when no query uses it. With Spark Connect keep the
    result for as long as the view is used: the server does not tell whether it is.

    Raises:
        InvalidRequest: an argument is wrong, or there is no such database.
        Unavailable: the store did not answer.

    """
    made = RefreshableView(name, spark, os.fspath(url), arguments)
    made.refresh()
    return made
