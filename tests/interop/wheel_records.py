"""A database's metadata as the wheel reads it: plain dictionaries with the wheel's field names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from slatedb.uniffi import AdminBuilder, CompactionSpec, ObjectStoreBuilder, SourceId, SsTableId


async def read_metadata(folder: str, path: str) -> dict[str, Any]:
    """All metadata that the wheel's `Admin` reads. Enumerations become ("enum", NAME)."""
    admin = AdminBuilder(path, ObjectStoreBuilder.from_url(f"file://{folder}").build()).build()
    found = {
        "manifest": await admin.read_manifest(None),
        "manifests": await admin.list_manifests(None, None),
        "checkpoints": await admin.list_checkpoints(None),
        "compactions": await admin.read_compactions(None),
        "all_compactions": await admin.list_compactions(None, None),
    }
    return {name: plain(record) for name, record in found.items()}


def plain(record: Any) -> Any:
    match record:
        case SsTableId():
            return record.value
        case Enum():
            return ("enum", record.name)
        case list():
            return [plain(entry) for entry in record]
        case None | int() | str() | bytes():
            return record
    if isinstance(record, SourceId.SORTED_RUN):
        return {"SortedRun": record[0]}
    if isinstance(record, SourceId.SST_VIEW):
        return {"SstView": record[0]}
    fields = {name: plain(value) for name, value in vars(record).items()}
    if isinstance(record, CompactionSpec.TIERED):
        fields["kind"] = "Tiered"
    if isinstance(record, CompactionSpec.DRAIN_SEGMENT):
        fields["kind"] = "DrainSegment"
    return fields
