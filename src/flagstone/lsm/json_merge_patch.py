"""JSON merge patch (RFC 7396) as a merge operator.

Patches must also combine before their document is known. RFC 7396 patches do not, for two reasons:

* A null in a patch deletes a member. It must be kept until the document is known, and must not appear in the document.
* Two patches do not always combine into one. ``5`` followed by ``{"b": 1}`` makes any document ``{"b": 1}``. No RFC
  7396 patch does that, because an object always merges into an object.

So patches that were combined without a document are stored in another form: a zero byte, with which no JSON text
begins, and the combination as JSON:

    combination = null            delete this member
                | [document]      replace the value
                | {name: combination, …}    make it an object if it is not one, then apply this to its members

Documents and single patches are plain JSON text. If `existing` has no zero byte, it is a document, and the patch is
applied to it; otherwise the patch is combined with it. If there is no document, `finish` applies the combination to
an absent one. SlateDB does not call `finish` and shows the stored form: call `finish` on the value that it returns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from flagstone.errors import InvalidRequest

_COMBINED: Final = b"\0"


class _Absent:
    """There is no document, or no such member."""


_ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True)
class JsonMergePatch:
    """Applies each operand to the document as a JSON merge patch.

    A document has one encoding, whatever the order of folding: UTF-8, names sorted, no spaces. Numbers with a fraction
    or an exponent are IEEE doubles. NaN, infinities and lone surrogates are refused.
    """

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """One operand, folded onto the value; see `MergeOperator`."""
        return self.merge_many(key, existing, [operand])

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:
        """Several operands, oldest first, folded at once."""
        try:
            if existing is not None and not existing.startswith(_COMBINED):
                document = _parse(existing)
                for operand in operands:
                    document = _apply(document, _read_patch(operand))
                return _print(document)
            parts = operands if existing is None else (existing, *operands)
            combined = _read_patch(parts[0])
            for operand in parts[1:]:
                combined = _combine(combined, _read_patch(operand))
            return _COMBINED + _print(combined)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"cannot merge JSON at {key!r}: {error}") from None

    def finish(self, key: bytes, combined: bytes) -> bytes:  # noqa: ARG002
        """The document of a combination that has no value below it."""
        if not combined.startswith(_COMBINED):
            return combined
        return _print(_apply(_ABSENT, _read_patch(combined)))


def _read_patch(operand: bytes) -> Any:
    """The operand as a combination."""
    if operand.startswith(_COMBINED):
        return _parse(operand[len(_COMBINED) :])
    patch = _parse(operand)
    # A null deletes a member, but it replaces a whole document.
    return _of_patch(patch) if isinstance(patch, dict) else [patch]


def _of_patch(patch: Any) -> Any:
    if isinstance(patch, dict):
        return {name: _of_patch(member) for name, member in patch.items()}
    return None if patch is None else [patch]


def _apply(target: Any, combination: Any) -> Any:
    """`target` after the combination. The combination is not a deletion: only the parent object can delete."""
    if isinstance(combination, list):
        return combination[0]
    result = dict(target) if isinstance(target, dict) else {}
    for name, member in combination.items():
        if member is None:
            result.pop(name, None)
        else:
            result[name] = _apply(result.get(name, _ABSENT), member)
    return result


def _combine(older: Any, newer: Any) -> Any:
    """One combination with the effect of `older` and then `newer`."""
    if not isinstance(newer, dict):
        return newer
    if older is None:
        return [_apply(_ABSENT, newer)]
    if isinstance(older, list):
        return [_apply(older[0], newer)]
    result = dict(older)
    for name, member in newer.items():
        result[name] = _combine(result[name], member) if name in result else member
    return result


def _parse(text: bytes) -> Any:
    return json.loads(text.decode(), parse_constant=_refuse_constant)


def _print(value: Any) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
