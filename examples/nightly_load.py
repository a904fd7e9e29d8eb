"""A catalogue that is loaded every night: build a new version, check it, then swap. Readers never see half of it.

    python examples/nightly_load.py

Every night has a database of its own, `catalogue-<day>`, which begins as a clone of the night before: no SST is
copied. Spark loads the changes into the clone, checks run on it, and one small write makes it the current one. If a
check fails, the new version is destroyed, and readers never saw it. If an error is found later, the pointer is set
back.
"""

from __future__ import annotations

import tempfile
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import flagstone
import flagstone.spark as fs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CURRENT = b"catalogue/current"


class Catalogue:
    """The versions, and the pointer to the current one: a row in a small database of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pointers = folder / "pointers"

    def url(self, day: date) -> Path:
        return self.folder / f"catalogue-{day}"

    def current(self) -> date | None:
        if not self._pointers.exists():
            return None
        with flagstone.open_reader(self._pointers) as reader:
            found = reader.get(CURRENT)
            return None if found is None else date.fromisoformat(found.decode())

    def swap(self, day: date, *, expected: date | None) -> None:
        """Make `day` the current version, unless another process has changed it meanwhile."""
        with flagstone.open(self._pointers) as db, db.transaction() as transaction:
            found = transaction.get(CURRENT)
            if found != (None if expected is None else str(expected).encode()):
                raise RuntimeError(
                    f"the current version is {found!r}, not {expected}: another load has swapped"
                )
            transaction.put(CURRENT, str(day).encode())
            transaction.commit(await_durable=True)

    def forget_before(self, day: date) -> list[Path]:
        """Destroy the versions before a day. `soft` gives readers and clones an hour to stop using them."""
        old = [path for path in self.folder.glob("catalogue-*") if path.name < self.url(day).name]
        for path in old:
            flagstone.Admin(path).destroy(soft=True, grace=timedelta(hours=1))
        return old


def load_night(spark: SparkSession, catalogue: Catalogue, day: date, changes: DataFrame) -> bool:
    """Load one night. Returns False if a check failed and the new version was destroyed.

    A crash leaves the pointer unchanged. Running the same night again finishes the clone, or finds it finished, and
    loads once more; a load is one commit, so the second one only repeats the first. A night that was refused needs
    another name.
    """
    before, url = catalogue.current(), catalogue.url(day)
    if before is not None and not _is_finished(url):
        flagstone.Admin(catalogue.url(before)).clone(url)
    fs.bulk_load(changes, url)
    fs.compact(spark, url, full=True)  # now all SSTs are its own, and the night before may be destroyed
    if not _is_good(spark, url):
        # Softly: the checkpoints of the checks' readers expire later.
        flagstone.Admin(url).destroy(soft=True)
        return False
    catalogue.swap(day, expected=before)
    return True


def _is_finished(url: Path) -> bool:
    """Whether an earlier attempt of the night has finished the clone; cloning onto it is refused."""
    try:
        return flagstone.Admin(url).manifest().value.initialized
    except flagstone.InvalidRequest:
        return False  # there is no database yet


def _is_good(spark: SparkSession, url: Path) -> bool:
    """Whether the version may be published: all objects are sound, and no price is missing."""
    rows = spark.read.format("flagstone").load(str(url))
    bad = rows.where("try_cast(cast(value as string) as double) is null").count()
    return bad == 0 and flagstone.Admin(url).verify().ok


def main(spark: SparkSession, folder: Path, *, products: int = 5000) -> None:
    catalogue, night = Catalogue(folder), date(2026, 11, 16)

    def prices(every: int, price: str) -> DataFrame:
        return spark.range(0, products, every).selectExpr(
            "concat('product/', lpad(id, 8, '0')) as key", f"cast({price} as string) as value"
        )

    def show(text: str) -> None:
        day = catalogue.current()
        assert day is not None
        with flagstone.open_reader(catalogue.url(day)) as reader:
            print(f"{text}: current is {day}, product 0 costs {reader.get(b'product/00000000')!r}")

    nights = [night + timedelta(days=number) for number in range(4)]
    assert load_night(spark, catalogue, nights[0], prices(1, "10.0"))
    show("everything loaded")
    assert load_night(spark, catalogue, nights[1], prices(100, "12.5"))
    show("one price in a hundred changed")
    assert not load_night(spark, catalogue, nights[2], prices(1000, "'to be announced'"))
    show("a load with invalid prices was refused")
    assert catalogue.current() == nights[1]
    assert load_night(spark, catalogue, nights[3], prices(100, "13.0"))
    show("the next one was fine")

    catalogue.swap(nights[1], expected=nights[3])
    show("swapped back")
    catalogue.swap(nights[3], expected=nights[1])
    forgotten = catalogue.forget_before(nights[1])
    print(f"forgotten: {', '.join(path.name for path in forgotten)}")
    with flagstone.open_reader(catalogue.url(nights[3])) as reader:
        assert reader.get(b"product/00000000") == b"13.0"
        assert reader.get(b"product/00000001") == b"10.0"


if __name__ == "__main__":
    session = fs.session(app_name="nightly load", spark_log_level="ERROR")
    with tempfile.TemporaryDirectory() as made:
        main(session, Path(made))
    session.stop()
