"""`delete --prefix`, `--from` and `--to`: show what a range holds, ask, and delete it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from flagstone.cli.output import confirm, print_json, print_line
from flagstone.db.read_methods import check_range
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import json_text, line_text, size_text
from flagstone.metadata.range_cut import overlapping_ssts

if TYPE_CHECKING:
    from flagstone.cli.context import Invocation
    from flagstone.types import KeyRange

_COUNTED: Final = 10_000
"""The preview counts so many rows at most: counting more would take longer than deleting them."""


def delete_range(
    call: Invocation, start: bytes | None, stop: bytes | None, prefix: bytes | None, *, yes: bool
) -> None:
    """Print what the range holds, and delete it if the user agrees. A crash leaves all of it or nothing."""
    if prefix is not None and (start is not None or stop is not None):
        raise InvalidRequest("delete by --prefix or by --from and --to, not both")
    keys = check_range(start, stop, prefix)
    connection = call.connect(long_work=True)
    with connection.reader() as reader, reader.scan(keys.start, keys.stop, include_expired=True) as found:
        rows = sum(1 for _ in islice(found.rows(), _COUNTED + 1))
        ssts = overlapping_ssts(reader.manifest(), keys)
    size = sum(sst.info.estimated_size for sst in ssts)
    preview: dict[str, Any] = {
        "from": None if keys.start is None else json_text(keys.start),
        "to": None if keys.stop is None else json_text(keys.stop),
        "rows": min(rows, _COUNTED),
        "more_rows": rows > _COUNTED,
        "ssts": len(ssts),
        "ssts_bytes": size,
    }
    count = f"more than {_COUNTED:,} rows" if rows > _COUNTED else f"{rows:,} row{'' if rows == 1 else 's'}"
    held = f"{count}, in {len(ssts):,} SST{'' if len(ssts) == 1 else 's'} of {size_text(size)}"
    confirm(f"this deletes {_text(keys)}: {held}", yes=yes)
    with connection.database(call.settings()) as database:
        handle = database.delete_range(keys.start, keys.stop)
    if call.json:
        print_json({**preview, "seq": handle.seq})
    else:
        done = f"sequence number {handle.seq}" if handle.seq else "nothing was there"
        print_line(f"deleted {_text(keys)}: {held}; {done}")


def _text(keys: KeyRange) -> str:
    start = "the start" if keys.start is None else line_text(keys.start)
    return f"the keys from {start} to {'the end' if keys.stop is None else line_text(keys.stop)}"
