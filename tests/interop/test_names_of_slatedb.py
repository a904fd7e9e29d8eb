"""`docs/slatedb.md` names every class, method and option of the wheel: with our counterpart, or as a difference."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone.compaction import DrainSpec, TieredSpec
from flagstone.config import Settings
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.read.scan import Scan
from flagstone.write.durability import WriteHandle

uniffi: Any = pytest.importorskip("slatedb.uniffi", reason="the official wheel is the judge here")

PAGE = (Path(__file__).parents[2] / "docs" / "slatedb.md").read_text(encoding="utf-8")
TOKEN = re.compile(r"`([^`]+)`")
OURS = {
    "Db": flagstone.Db,
    "DbReader": flagstone.DbReader,
    "Admin": flagstone.Admin,
    "WalReader": flagstone.WalReader,
    "Settings": Settings,
    "Transaction": Transaction,
    "Snapshot": Snapshot,
    "Scan": Scan,
    "WriteHandle": WriteHandle,
    "flagstone": flagstone,
    "TieredSpec": TieredSpec,
    "DrainSpec": DrainSpec,
}


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading, without the table's header."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def expanded(token: str) -> list[str]:
    """Expand `Db.{get,put}` to `Db.get` and `Db.put`."""
    before, brace, after = token.partition("{")
    return [before + part for part in after.rstrip("}").split(",")] if brace else [token]


def named() -> list[str]:
    cells = [row[0] for row in rows("API names")] + [row[0] for row in rows("What differs")]
    return [name for cell in cells for token in TOKEN.findall(cell) for name in expanded(token)]


def public_names() -> set[str]:
    """Classes, the methods of those that have behaviour, and the fields of those that are options."""
    found = set()
    for name, held in vars(uniffi).items():
        if name.startswith("_") or name.endswith(("Protocol", "Impl")) or inspect.ismodule(held):
            continue
        if inspect.isfunction(held) and name != "import_module":
            found.add(name)
        if not inspect.isclass(held):
            continue
        found.add(name)
        if name.endswith("Options"):
            fields = [field for field in inspect.signature(held.__init__).parameters if field != "self"]
            found |= {f"{name}.{field}" for field in fields}
        elif not issubclass(held, Enum) and not any(part.startswith("is_") for part in dir(held)):
            methods = [
                part for part in vars(held) if not part.startswith("_") and callable(getattr(held, part))
            ]
            found |= {f"{name}.{method}" for method in methods}
    return found


def test_the_wheel_has_public_names_to_compare() -> None:
    found = public_names()
    assert len(found) > 230
    assert {"Db.scan_prefix", "WriteOptions.seqnum", "DbCache", "Error.Closed", "init_logging"} <= found


def test_every_name_of_the_wheel_is_in_one_of_the_tables() -> None:
    assert sorted(public_names() - set(named())) == []


def test_the_tables_name_nothing_that_the_wheel_does_not_have() -> None:
    known = public_names()
    rust_only = {"scan_prefix_by_recency", "subscribe", "CompactionFilter"}
    ours = {"ttl", "expire_at", "slatedb.object_store.error_count"}
    assert sorted(set(named()) - known - rust_only - ours) == []


def test_no_name_is_listed_twice() -> None:
    listed = [name for name in named() if name not in ("ttl", "expire_at")]
    assert {name for name in listed if listed.count(name) > 1} == set()


def test_every_counterpart_in_the_tables_exists_in_flagstone() -> None:
    wrong = []
    for row in rows("API names"):
        for token in TOKEN.findall(row[1]):
            owner, dot, attribute = re.split(r"[(\s]", token)[0].partition(".")
            if dot and owner in OURS and attribute != "*" and not hasattr(OURS[owner], attribute):
                wrong.append(token)
    assert wrong == []
