"""`flagstone.scan_polars`: a database as a Polars LazyFrame.

Polars gives the columns that a query needs, its predicate and its limit. The source reads the key ranges that can match
and applies the whole predicate to their rows, so a result never depends on what was understood of the predicate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flagstone.db.collections.collection import Collection
from flagstone.db.reader.reader import DbReader
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot
from flagstone.errors import InvalidRequest
from flagstone.query.conditions import Constant
from flagstone.query.dataset import Dataset, open_dataset

if TYPE_CHECKING:
    import polars as pl


def scan_polars(
    source: str | os.PathLike[str] | Db | DbReader | Snapshot | Collection[Any, Any] | Dataset,
    **options: Any,
) -> pl.LazyFrame:
    """The rows of a database as a Polars LazyFrame. The options are those of `flagstone.dataset`.

    All uses of the frame show one moment, which it keeps until Python drops it. To release it earlier, open
    `flagstone.dataset(...)` as a context manager and give that dataset as the source.

    Raises:
        InvalidRequest: Polars is not installed, or as `flagstone.dataset` does.
        Unavailable: the store did not answer.

    """
    try:
        from polars.io.plugins import register_io_source  # noqa: PLC0415 - an optional package
    except ImportError:
        raise InvalidRequest("Polars is not installed; install flagstone[arrow]") from None
    from flagstone.query.polars_expressions import read_predicate  # noqa: PLC0415 - it needs Polars

    if isinstance(source, Dataset):
        if options:
            raise InvalidRequest(f"{next(iter(options))} belongs to an address; a dataset is already open")
        dataset = source
    else:
        dataset = open_dataset(source, **options)
    if dataset.filtered:
        raise InvalidRequest("give the dataset itself, and filter the LazyFrame")

    def batches(
        columns: list[str] | None,
        predicate: pl.Expr | None,
        limit: int | None,
        batch_size: int | None,  # noqa: ARG001
    ) -> Iterator[pl.DataFrame]:
        rows = dataset.rows
        condition = Constant(value=True) if predicate is None else read_predicate(predicate)
        wanted = rows.schema.names if columns is None else columns
        referred = {*wanted, *(() if predicate is None else predicate.meta.root_names())}
        left = limit
        for batch in rows.scan(condition, [name for name in rows.schema.names if name in referred]):
            frame = _frame(batch)
            if predicate is not None:
                frame = frame.filter(predicate)
            if left is not None:
                frame = frame.head(left)
                left -= frame.height
            yield frame.select(wanted)
            if left == 0:
                return

    return register_io_source(batches, schema=_frame(dataset.schema.empty_table()).schema, is_pure=True)


def _frame(rows: Any) -> pl.DataFrame:
    import polars as pl  # noqa: PLC0415 - an optional package

    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame), "rows become a frame"
    return frame
