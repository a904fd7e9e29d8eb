"""Merge operators: updates written as operands and folded together later.

A key's history is a base (a value, or nothing) and operands on top of it. The engine folds them when it reads,
and in part when it flushes and compacts, at moments the caller does not choose. The result must not depend on
those moments, hence the law every operator obeys, for any base and any way to cut the operands into groups:

    fold(base, [a, b, c]) == fold(base, [fold(None, [a, b]), c])

What `merge` returns for ``existing=None`` is therefore two things at once: what the key is worth if nothing lies
below, and an operand that may meet an older base later. Operators for which these differ have `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from flagstone.errors import InternalError, InvalidRequest

NO_OPERATOR: Final = (
    "no merge operator is configured; pass merge_operator=…, the one its merges were written for"
)

_MergeMany = Callable[[bytes, bytes | None, Sequence[bytes]], bytes]
_Finish = Callable[[bytes, bytes], bytes]


class MergeOperator(Protocol):
    """Combines what is there with an operand. Pure: same arguments, same bytes, on every machine and for ever.

    Two more methods are used when an operator has them:

    ``merge_many(key, existing, operands) -> bytes``
        The same as merging the operands (at least one, oldest first) one after the other, only faster.
    ``finish(key, combined) -> bytes``
        The value that operands amount to when it is certain that no base lies below. `combined` is the result of
        merging onto None. Other engines do not call it, so anything it hides is visible to them.

    A method that raises fails the read it was called for; the message carries the key. Refuse bad operands in
    ``merge(key, None, operand)``: it is tried before a merge is accepted, while the caller can still fix it.
    """

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """`existing` with `operand` applied; None means that no older base or operand is in sight."""
        ...


def fold(operator: MergeOperator, key: bytes, base: bytes | None, operands: Sequence[bytes]) -> bytes:
    """`operands`, oldest first, merged onto `base` (None: nothing known below). At least one operand.

    Whatever the operator raises comes through, with the key in a note.
    """
    if not operands:
        raise InternalError(f"nothing to fold for key {key!r}")
    merge_many: _MergeMany | None = getattr(operator, "merge_many", None)
    try:
        if merge_many is not None:
            return merge_many(key, base, operands)
        result = base
        for operand in operands:
            result = operator.merge(key, result, operand)
    except Exception as error:
        error.add_note(_note(operator, key))
        raise
    assert result is not None
    return result


def fold_from_nothing(operator: MergeOperator, key: bytes, operands: Sequence[bytes]) -> bytes:
    """The value that `operands`, oldest first, amount to when it is certain that no base lies below them."""
    combined = fold(operator, key, None, operands)
    finish: _Finish | None = getattr(operator, "finish", None)
    if finish is None:
        return combined
    try:
        return finish(key, combined)
    except Exception as error:
        error.add_note(_note(operator, key))
        raise


def check_operand(operator: MergeOperator | None, key: bytes, operand: bytes) -> None:
    """Refuse an operand that could never be folded, before it is written.

    Once written it would fail every read of its key until the key is overwritten or deleted.
    """
    if operator is None:
        raise InvalidRequest(f"cannot merge into {key!r}: {NO_OPERATOR}")
    try:
        fold(operator, key, None, [operand])
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"the merge operator refuses the operand for {key!r}: {error}") from error


def _note(operator: MergeOperator, key: bytes) -> str:
    named = type(getattr(operator, "counted", operator)).__name__
    return f"raised by the merge operator {named} for key {key!r}"


class CountingOperator:
    """Another operator, with every operand counted. What else that one has (`finish`) it has too."""

    def __init__(self, counted: MergeOperator, count: Callable[[int], None]) -> None:
        self.counted = counted
        self._count = count
        many = getattr(counted, "merge_many", None)
        if many is not None:
            self.merge_many: Callable[[bytes, bytes | None, Sequence[bytes]], bytes] = (
                lambda key, base, operands: self._many(many, key, base, operands)
            )

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """See `MergeOperator.merge`."""
        self._count(1)
        return self.counted.merge(key, existing, operand)

    def _many(self, many: Any, key: bytes, base: bytes | None, operands: Sequence[bytes]) -> bytes:
        self._count(len(operands))
        folded: bytes = many(key, base, operands)
        return folded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("counted", "merge_many"):
            raise AttributeError(name)
        return getattr(self.counted, name)
