"""The golden databases: written by the official wheel, with what it read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class GoldenDatabase:
    """One database of the corpus: a store folder, the path inside it, and the expected contents."""

    name: str
    store: Path
    path: str
    expected: dict[str, Any]
    wal_store: Path | None = None


def databases() -> list[GoldenDatabase]:
    """All 31 of them."""
    found = []
    for expected in sorted(DATA.glob("*/expected*.json")):
        folder = expected.parent
        contents = json.loads(expected.read_text())
        name = (
            folder.name if expected.stem == "expected" else f"{folder.name}/{expected.stem.partition('_')[2]}"
        )
        split = (folder / "walroot").is_dir()
        found.append(
            GoldenDatabase(
                name,
                folder / "main" if split else folder,
                contents["path"],
                contents,
                folder / "walroot" if split else None,
            )
        )
    return found


def ssts() -> list[Path]:
    """Every SST of the corpus that is not a fence, WAL files included."""
    return sorted(path for path in DATA.rglob("*.sst") if path.stat().st_size > 10)


every_database = pytest.mark.parametrize("database", databases(), ids=lambda database: database.name)
"""Runs a test once for each golden database."""


def unhex(pairs: dict[str, str]) -> dict[bytes, bytes]:
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in pairs.items()}
