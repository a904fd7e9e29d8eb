"""What a load did, told to whoever asked for it: Spark carries nothing back from where the commit happens."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flagstone.spark.progress import per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A finished load: all its rows have the sequence number `seq`, and are in manifest `manifest_id`.

    `bytes` are those of the tables. `seconds` is how long the whole of it took whoever asked for it.
    """

    rows: int
    tables: int
    bytes: int
    seq: int
    manifest_id: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def rows_per_s(self) -> float:
        """How many rows were loaded per second; only where the whole was timed."""
        return per_second(self.rows, self.seconds)


def write_receipt(path: str, report: LoadReport) -> None:
    """Leave the report at `path`: whole, or not at all. A client of Spark Connect may have its folders elsewhere."""
    temporary = Path(f"{path}.part")
    if not temporary.parent.is_dir():
        return
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    temporary.replace(path)


def read_receipt(path: str | os.PathLike[str]) -> LoadReport | None:
    """The report, if the commit ran on a machine that shares this folder with us."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return LoadReport(**json.loads(text)) if text else None
