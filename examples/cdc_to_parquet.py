"""Change data to Parquet: every change of a database, once and in commit order, with Spark and without.

    python examples/cdc_to_parquet.py

Both copy what is there when they begin, then follow the log. The log is kept for them by name (`lake`, `archive`)
until they say that they have it, also while they are down: garbage collection waits for them. Run either twice, and
the second run goes on where the first one stopped.
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
    """A stream that takes all there is and ends; without the trigger it would run for ever."""
    changes = spark.readStream.format("flagstone").option("consumer", "lake").load(str(url))
    query = (
        changes.writeStream.format("parquet")
        .option("checkpointLocation", str(lake / "_checkpoint"))
        .trigger(availableNow=True)
        .start(str(lake))
    )
    query.awaitTermination()


def copy_with_python(url: Path, archive: Path) -> None:
    """The same in one process: a file for the copy, and a file for each batch of changes, named by its number.

    A crash between the file and `commit` brings the batch again, and the same name with it: nothing is there twice.
    """
    archive.mkdir(exist_ok=True)
    with flagstone.open_feed(url, "archive") as feed:
        if feed.snapshot is not None:
            rows = [(row.seq, "put", row.key, row.value) for row in feed.snapshot.scan().rows()]
            _write(archive / "copy.parquet", rows)
            feed.copied()
        for batch in feed.follow(timeout_s=0):  # what there is now; without the limit, for ever
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
    """What a database with these changes shows: of every key the last one."""
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
