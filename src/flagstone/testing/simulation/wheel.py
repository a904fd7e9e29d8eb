"""The end state of a world as SlateDB's own wheel shows it: the same rows, read from the same bytes.

The objects of the world go to a local folder. The wheel reads them in a process of its own, because it starts threads
that outlive its databases: `python -m flagstone.testing.simulation.wheel FOLDER ROLES…` prints the rows.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from flagstone.store.memory import MemoryStore
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.world import Outcome

_TIMEOUT_S: Final = 120


def find_difference(outcome: Outcome) -> str | None:
    """How the wheel's rows differ from those of the world; None if they are the same."""
    assert outcome.rows is not None, "the world has come to its end"
    with TemporaryDirectory() as folder:
        for name, store in (("main", outcome.store), ("wal", outcome.wal_store)):
            if store is not None:
                _export(store, Path(folder) / name)
        made = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "flagstone.testing.simulation.wheel", folder, *sorted(outcome.cast)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    if made.returncode:
        return f"the wheel cannot read the database: {made.stderr.strip().splitlines()[-1]}"
    found = {bytes.fromhex(key): bytes.fromhex(value) for key, value in json.loads(made.stdout).items()}
    for key in sorted({*found, *outcome.rows}):
        if found.get(key) != outcome.rows.get(key):
            return f"the wheel shows {found.get(key)!r} for {key!r}; it is {outcome.rows.get(key)!r}"
    return None


def _export(store: MemoryStore, folder: Path) -> None:
    folder.mkdir()
    for meta in store.list(""):
        target = folder / meta.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.get(meta.path).data)


async def _scan(folder: Path, *, segments: bool) -> dict[bytes, bytes]:
    """All rows that do not expire, as a reader of the wheel shows them."""
    from slatedb import uniffi  # noqa: PLC0415 - only this process has the wheel's threads

    class Concatenation(uniffi.MergeOperator):  # type: ignore[misc]
        def merge(self, key: bytes, existing_value: bytes | None, operand: bytes) -> bytes:  # noqa: ARG002
            return (existing_value or b"") + operand

    class FirstByte(uniffi.PrefixExtractor):  # type: ignore[misc]
        def name(self) -> str:
            return "first"

        def prefix_len(self, target: Any) -> int:  # noqa: ARG002
            return 1

    def store(name: str) -> Any:
        return uniffi.ObjectStoreBuilder.from_url(f"file://{folder / name}").build()

    builder = uniffi.DbReaderBuilder(MAIN_PATH, store("main"))
    builder.with_merge_operator(Concatenation())
    builder.with_reader_mode(uniffi.ReaderMode.FOLLOW_LATEST())
    if segments:
        builder.with_segment_extractor(FirstByte())
    if any((folder / "wal").iterdir()):
        builder.with_wal_object_store(store("wal"))
    reader = await builder.build()
    everything = uniffi.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)
    found: dict[bytes, bytes] = {}
    rows = await reader.scan(everything)
    while batch := await rows.next_batch(1000):
        found.update((row.key, row.value) for row in batch if row.expire_ts is None)
    await reader.shutdown()
    return found


def _main(folder: str, *roles: str) -> None:
    rows = asyncio.run(_scan(Path(folder), segments="segments" in roles))
    print(json.dumps({key.hex(): value.hex() for key, value in rows.items()}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
