"""What `submit-compaction --request` asks for: SlateDB's JSON, and from there to jobs.

"Full"                                          every tree into one run
{"FullSegment": {"segment": "eu/"}}             that of one segment; bytes as text, 0x… or a list of numbers
{"Spec": {"sources": [{"SstView": "01H…"}, {"SortedRun": 3}], "destination": 3, "segment": ""}}
{"Spec": {"DrainSegment": {"segment": "eu/", "sources": […]}}}      drop them without replacement
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from flagstone.cli.binary import KeyForm, parse_bytes
from flagstone.errors import InvalidRequest
from flagstone.maintenance.compaction.picker import plan_full
from flagstone.metadata.compactions import Compactions, DrainSpec, Spec, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import parse_ulid
from flagstone.types import RunId, Ulid

_FORMS: Final = '"Full", {"FullSegment": {"segment": …}} or {"Spec": {"sources": […], "destination": …}}'


def plan_request(text: str, manifest: Manifest, compactions: Compactions) -> Sequence[Spec]:
    """The jobs that a request means for the database as it is.

    Raises:
        InvalidRequest: the text is not such a request, or there is no such segment.

    """
    try:
        request = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the request is not JSON ({error}); write {_FORMS}") from None
    match request:
        case "Full":
            return plan_full(manifest, compactions, None)
        case {"FullSegment": {"segment": segment}, **rest} if not rest:
            prefix = _bytes(segment)
            if manifest.tree_of(prefix) is None:
                raise InvalidRequest(f"there is no segment {segment!r}")
            return plan_full(manifest, compactions, prefix)
        case {"Spec": {"DrainSegment": dict() as spec}, **rest} if not rest:
            return [_drain(spec)]
        case {"Spec": {"Tiered": dict() as spec}, **rest} if not rest:
            return [_tiered(spec)]
        case {"Spec": dict() as spec, **rest} if not rest:
            return [_tiered(spec)]
        case _:
            raise InvalidRequest(f"{text} is not a compaction request; write {_FORMS}")


def _tiered(spec: dict[str, Any]) -> TieredSpec:
    views, runs = _sources(spec)
    destination = spec.get("destination")
    if not isinstance(destination, int) or isinstance(destination, bool) or not 0 <= destination < 2**32:
        raise InvalidRequest(f"the destination of a compaction is the number of a run, not {destination!r}")
    return TieredSpec(views, runs, RunId(destination), _bytes(spec.get("segment", "")))


def _drain(spec: dict[str, Any]) -> DrainSpec:
    views, runs = _sources(spec)
    return DrainSpec(_bytes(spec.get("segment", "")), views, runs)


def _sources(spec: dict[str, Any]) -> tuple[tuple[Ulid, ...], tuple[RunId, ...]]:
    views: list[Ulid] = []
    runs: list[RunId] = []
    sources = spec.get("sources")
    if not isinstance(sources, list):
        raise InvalidRequest('a compaction has "sources", such as [{"SstView": "01H…"}, {"SortedRun": 3}]')
    for source in sources:
        match source:
            case {"SstView": str(view)} | {"Sst": str(view)}:
                views.append(parse_ulid(view))
            case {"SortedRun": int(run)} if not isinstance(run, bool):
                runs.append(RunId(run))
            case _:
                raise InvalidRequest(f'a source is {{"SstView": "01H…"}} or {{"SortedRun": 3}}, not {source}')
    return tuple(views), tuple(runs)


def _bytes(value: Any) -> bytes:
    """Bytes as we write them, or as SlateDB does: a list of numbers."""
    if isinstance(value, str):
        return parse_bytes(value, KeyForm.auto, what="segment")
    try:
        return bytes(value)
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"a segment is text, 0x… or a list of numbers below 256, not {value!r}"
        ) from None
