"""`delete`: the keys of a frame, or the rows for which a condition holds, deleted by one load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.spark.address import shared_address
from flagstone.spark.held_state import CheckpointRead, hold_checkpoint
from flagstone.spark.load.bulk_load import bulk_load
from flagstone.spark.load.merge_into import (
    KEY,
    LIFETIME,
    key_prefix_of,
    release,
    table_under,
    with_keys,
)
from flagstone.spark.load.plan import LoadReport
from flagstone.spark.options import ReadOptions, option_texts
from flagstone.spark.sessions import register
from flagstone.spark.stored_schema import fetch_schema


def delete(
    rows: DataFrame | str,
    url: str | os.PathLike[str],
    *,
    key: str = "key",
    key_columns: Sequence[str] = (),
    schema: StructType | str | None = None,
    value_columns: Sequence[str] | None = None,
    value_format: Literal["row", "json"] | None = None,
    store: str | None = None,
    store_options: Mapping[str, Any] | None = None,
    wal_store: str | None = None,
    lifetime: timedelta | str = LIFETIME,
    **options: Any,
) -> LoadReport | None:
    """Delete the keys of a frame, or the rows for which a condition holds, with one commit.

    A frame needs the key only: the column `key`, or the `key_columns`, which a structured database knows. Keys that the
    database does not have are no error. A condition is SQL over the columns of a read: `key` and `value` as bytes, or
    those of the stored schema, or with `key_columns` those of `schema`. It is checked at one state of the database, and
    the load is newer than every write before its commit: a row that another process writes in between is deleted as
    well, if its key is among the found ones. Rows that do not decode are not deleted. `key.prefix` is the option of
    `bulk_load`: the condition sees only the rows of that table.

    Returns None if the driver runs on another machine, or if there is nothing to delete.
    """
    kept_for = as_duration(lifetime, "lifetime", minimum=timedelta(seconds=1))
    address = shared_address(url, store=store, store_options=store_options, wal_store=wal_store)
    held = None
    prefix = key_prefix_of(options)
    loading = {name: value for name, value in options.items() if name != "key.prefix"}
    try:
        if isinstance(rows, str):
            held = hold_checkpoint(ReadOptions(address, lifetime=kept_for, prefix=prefix), owned=True)
            mapping = {
                "key.columns": list(key_columns),
                "value.columns": value_columns,
                "value.format": value_format,
            }
            if prefix and not key_columns and table_under(held) is None:
                raise InvalidRequest(_no_schema(prefix))
            frame, key = _where(rows, held, schema, mapping if key_columns else {}), "key"
        else:
            frame = rows
        table = fetch_schema(address, prefix or b"") if held is None else table_under(held)
        names = tuple(key_columns) or (() if table is None else table.key_names)
        if prefix and not names:
            raise InvalidRequest(_no_schema(prefix))
        keyed = with_keys(frame, key, names, table, prefix or b"")
        deleted = keyed.select(
            F.col(KEY).alias("key"), F.lit(b"").alias("value"), F.lit("delete").alias("op")
        )
        return bulk_load(
            deleted.dropDuplicates(["key"]),
            url,
            store=store,
            store_options=store_options,
            wal_store=wal_store,
            raw=True,
            **loading,
        )
    finally:
        if held is not None:
            release(held, None)


def _no_schema(prefix: bytes) -> str:
    return f"no schema is stored for the prefix {prefix!r}: name the key columns with key_columns"


def _where(
    condition: str, held: CheckpointRead, schema: StructType | str | None, options: Mapping[str, Any]
) -> DataFrame:
    """The rows at the checkpoint for which the condition holds."""
    spark = SparkSession.getActiveSession()
    if spark is None:
        raise InvalidRequest(
            "there is no active Spark session; make one, or pass a frame with the keys to delete"
        )
    register(spark)
    address = held.options.address
    given = {
        "checkpoint": held.checkpoint,
        "store": address.store,
        "wal_store": address.wal_store,
        "prefix": held.options.prefix,
        # The columns of a malformed row are null, which is not what they are: a condition must not select it by them.
        "mode": "DROPMALFORMED",
        **options,
    }
    given |= {f"store.{name}": chosen for name, chosen in address.store_options.items()}
    reader = spark.read.format("flagstone").options(**option_texts(given))
    return (reader if schema is None else reader.schema(schema)).load(address.path).where(condition)
