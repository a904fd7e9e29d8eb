"""Range deletes in a change stream: one row with the start and the end of the range, or a refusal.

A range delete removes keys that the change does not name. A stream of bytes shows it as a row. A stream of ordinary
columns cannot: the ends of a range need not be keys of its rows. A stream with former rows cannot either: it would have
to name every key and the value that it had. Such a stream ends with `ChangesMissing`, so that `on_overwrite` decides
how the query goes on, as after a load that replaced everything.

A range delete without a key of the stream's own range passes without a row. A stream with former rows refuses it all
the same: it reads them from an earlier state and the WAL since then, and the query may continue with a wider range.
"""

from __future__ import annotations

import pyarrow as pa

from flagstone.changes.columns import CHANGE_COLUMNS
from flagstone.changes.step import ChangesMissing
from flagstone.loads.edit import VisibleLoad
from flagstone.spark.stream.options import StreamOptions
from flagstone.types import KeyRange


def ranges_within(load: VisibleLoad, keys: KeyRange) -> list[KeyRange]:
    """The parts of a range delete inside `keys`."""
    parts = [deleted.intersect(keys) for deleted in load.deleted_ranges]
    return [part for part in parts if not part.empty]


def check_shown(load: VisibleLoad, options: StreamOptions, *, typed: bool) -> None:
    """Raise `ChangesMissing` if the load is a range delete that the stream cannot deliver exactly."""
    if not (options.needs_base or (typed and ranges_within(load, options.keys))):
        return
    if not load.deleted_ranges:
        return
    if typed:
        reason = "the columns of the stream are made of key and value, and cannot hold the ends of a range"
    else:
        reason = "the stream would have to name each of its keys and the value that the key had, which are not recorded"
    raise ChangesMissing(
        f"the range delete with the sequence number {load.seq} cannot be delivered: {reason}; use the option "
        "on_overwrite=delete_and_put or on_overwrite=marker in a new query, with which it goes on with a copy, or "
        "stream bytes without 'before', where a range delete is one row"
    )


def range_delete_rows(load: VisibleLoad, keys: KeyRange) -> pa.RecordBatch:
    """The rows for the parts of a range delete inside `keys`; `value` is the end of each, null without one."""
    parts = ranges_within(load, keys)
    cells = {
        "op": ["delete_range"] * len(parts),
        "key": [part.start or b"" for part in parts],
        "value": [part.stop for part in parts],
        "seq": [load.seq] * len(parts),
        "created_ms": [load.created_ms] * len(parts),
    }
    arrays = [pa.array(cells.get(field.name, [None] * len(parts)), field.type) for field in CHANGE_COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGE_COLUMNS)
