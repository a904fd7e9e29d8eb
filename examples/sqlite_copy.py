"""A copy in SQLite that follows a database: for joins and full-text search, in a process of its own.

    python examples/sqlite_copy.py

The follower has a name. Garbage collection keeps the changes that it has not read, also while it is not running. Each
batch is one SQLite transaction, and its position is committed after it. After a crash between the two the batch comes
again, and applying it again changes nothing.
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import flagstone

TABLE = "create table if not exists product (key text primary key, name text)"


def open_copy(path: Path) -> sqlite3.Connection:
    copy = sqlite3.connect(path)
    copy.execute(TABLE)
    return copy


def catch_up(shop: Path, copy: sqlite3.Connection) -> int:
    """Apply what is new, and return how many changes that were."""
    applied = 0
    with flagstone.open_feed(shop, "sqlite") as feed:
        if feed.snapshot is not None:  # the first time, or after missed changes: copy all rows
            with copy:
                copy.execute("delete from product")
                rows = [(key.decode(), value.decode()) for key, value in feed.snapshot.scan()]
                copy.executemany("insert into product values (?, ?)", rows)
            applied += len(rows)
            feed.copied()
        for batch in feed.follow(timeout_s=0):  # without a timeout it would go on for ever
            with copy:
                for change in batch.changes:
                    key = change.key.decode()
                    if change.op == "delete_range":  # up to `value`, which is None for a range without an end
                        stop = None if change.value is None else change.value.decode()
                        copy.execute(
                            "delete from product where key >= ?1 and (?2 is null or key < ?2)", [key, stop]
                        )
                    elif change.value is None:
                        copy.execute("delete from product where key = ?", [key])
                    else:
                        copy.execute(
                            "insert or replace into product values (?, ?)", [key, change.value.decode()]
                        )
            applied += len(batch.changes)
            feed.commit(batch)
    return applied


def main(folder: Path) -> None:
    shop = folder / "shop"
    with flagstone.open(shop) as db:
        for number in range(500):
            db.put(f"product/{number:04}".encode(), f"lamp {number}".encode())
        db.flush("wal")
        copy = open_copy(folder / "copy.sqlite")
        print(f"copied {catch_up(shop, copy)} rows")
        copy.close()

        db.put(b"product/0007", b"desk 7")
        db.delete(b"product/0008")
        db.delete_range(b"product/0200", b"product/0400")
        db.flush("wal")
        copy = open_copy(folder / "copy.sqlite")  # as a new process does
        print(f"applied {catch_up(shop, copy)} changes")
        assert catch_up(shop, copy) == 0
        assert dict(copy.execute("select * from product")) == {
            key.decode(): value.decode() for key, value in db.scan()
        }
        assert copy.execute("select name from product where name like 'desk%'").fetchall() == [("desk 7",)]
        copy.close()
    print("the copy equals the database")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
