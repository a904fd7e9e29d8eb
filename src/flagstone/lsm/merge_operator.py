"""Merge operators: updates are written as operands and folded together later.

The history of a key is a base (a value, or nothing) and operands on top of it. The engine folds them when it reads, and
in part when it flushes and compacts. The caller does not choose these moments, so the result must not depend on them.
Every operator must obey this law, for any base and any grouping of the operands:

    fold(base, [a, b, c]) == fold(base, [fold(None, [a, b]), c])

So the result of `merge` with ``existing=None`` has two meanings: the value of the key if there is no base, and an
operand that may be merged into an older base later. An operator for which the two differ has a method `finish`.
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
    """Combines the existing value with an operand. Pure: the same arguments always give the same bytes.

    An operator may have two more methods:

    ``merge_many(key, existing, operands) -> bytes``
        The same as merging the operands (at least one, oldest first) one after the other, but faster.
    ``finish(key, combined) -> bytes``
        The value of operands that certainly have no base. `combined` is the result of merging onto None. SlateDB does
        not call it and shows `combined`.

    If a method raises, the read that called it fails; the message contains the key. Refuse bad operands in
    ``merge(key, None, operand)``: the engine calls it before it accepts a merge, while the caller can still react.
    """

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        """`existing` with `operand` applied; None means that no older base or operand is known."""
        ...


def check_operator(operator: MergeOperator | None) -> None:
    """Raise `InvalidRequest` for what cannot merge: its first merge would fail, perhaps in a compaction."""
    if isinstance(operator, type):
        raise InvalidRequest(f"merge_operator is an object, not a class; write {operator.__name__}()")
    if operator is not None and not callable(getattr(operator, "merge", None)):
        raise InvalidRequest(
            f"merge_operator is an object with a method merge(key, existing, operand), not {operator!r}"
        )


def fold(operator: MergeOperator, key: bytes, base: bytes | None, operands: Sequence[bytes]) -> bytes:
    """`operands`, oldest first, merged onto `base` (None: no base is known). At least one operand.

    An exception of the operator is raised with a note that contains the key.
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
    """The value of `operands`, oldest first, that certainly have no base."""
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
    """Refuse an operand that the operator cannot fold, before it is written.

    Otherwise every read of its key would fail until the key is overwritten or deleted.
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
    """Counts the operands of another operator, and has its other methods (`finish`), too."""

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
