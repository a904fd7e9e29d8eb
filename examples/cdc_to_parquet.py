"""Change data to Parquet: every change of a database, once and in commit order, with Spark and without.

    python examples/cdc_to_parquet.py

Both copy the existing rows first, then follow the WAL. Garbage collection keeps the WAL for each consumer by its name
(`lake`, `archive`) until the consumer commits, also while it is not running. Run either twice, and
the second run continues where the first one stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import flagstone
import flagstone.spark as fs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[int, str, bytes, bytes | None]
COLUMNS = {"seq": pa.int64(), "op": pa.string(), "key": pa.binary(), "value": pa.binary()}


def copy_with_spark(spark: SparkSession, url: Path, lake: Path) -> None:
    """A stream that takes all present changes and ends; without the trigger it would not end."""
    changes = spark.readStream.format("flagstone").option("consumer", "lake").load(str(url))
    query = (
        changes.writeStream.format("parquet")
        .option("checkpointLocation", str(lake / "_checkpoint"))
        .trigger(availableNow=True)
        .start(str(lake))
    )
    query.awaitTermination()


def copy_with_python(url: Path, archive: Path) -> None:
    """The same in one process: one file for the copy, and one for each batch of changes, named after its WAL file id.

    After a crash between the file and `commit` the batch comes again, and replaces the file with the same name.
    """
    archive.mkdir(exist_ok=True)
    with flagstone.open_feed(url, "archive") as feed:
        if feed.snapshot is not None:
            rows = [(row.seq, "put", row.key, row.value) for row in feed.snapshot.scan().rows()]
            _write(archive / "copy.parquet", rows)
            feed.copied()
        for batch in feed.follow(timeout_s=0):  # the present changes; without the timeout it does not end
            changes = [(change.seq, change.op, change.key, change.value) for change in batch.changes]
            _write(archive / f"changes-{batch.next_id:012}.parquet", changes)
            feed.commit(batch)


def _write(path: Path, rows: Sequence[Row]) -> None:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(COLUMNS)
    arrays = [pa.array(cells, kind) for cells, kind in zip(columns, COLUMNS.values(), strict=True)]
    pq.write_table(pa.table(dict(zip(COLUMNS, arrays, strict=True))), path)


def read_changes(folder: Path) -> list[Row]:
    table = ds.dataset(folder, format="parquet").to_table(columns=list(COLUMNS))
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))


def apply(changes: list[Row]) -> dict[bytes, bytes]:
    """The rows of a database with these changes: the last change of every key."""
    shown: dict[bytes, bytes] = {}
    for _, op, key, value in changes:
        if op == "put" and value is not None:
            shown[key] = value
        else:
            shown.pop(key, None)
    return shown


def main(spark: SparkSession, folder: Path) -> None:
    url, lake, archive = folder / "shop", folder / "lake", folder / "archive"
    with flagstone.open(url) as db:
        for number in range(1000):
            db.put(b"order/%06d" % number, b"placed")
        db.flush("wal")
        for turn in ("the copy", "and what has changed since"):
            copy_with_spark(spark, url, lake)
            copy_with_python(url, archive)
            shown = dict(db.scan())
            streamed, archived = read_changes(lake), read_changes(archive)
            print(f"{turn}: {len(streamed)} rows in the lake, {len(archived)} in the archive")
            assert apply(streamed) == apply(archived) == shown
            assert streamed == archived
            with db.batch() as batch:  # a transaction is never split between two files
                for number in range(0, 1000, 10):
                    batch.put(b"order/%06d" % number, b"shipped")
                batch.delete(b"order/000005")
            db.flush("wal")
    print("both equal the database, change for change")


if __name__ == "__main__":
    session = fs.session(app_name="change data", spark_log_level="ERROR")
    with tempfile.TemporaryDirectory() as made:
        main(session, Path(made))
    session.stop()
