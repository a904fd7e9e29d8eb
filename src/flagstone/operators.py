"""Ready-made merge operators, for `flagstone.open(..., merge_operator=flagstone.operators.Counter())`.

Counter            adds numbers
Minimum, Maximum   keep the smaller or the larger value
Concatenate        appends
SetUnion           adds members to a set
JsonMergePatch     changes members of a JSON document
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from flagstone.lsm.json_merge_patch import JsonMergePatch
from flagstone.lsm.operators import Concatenate, Counter, Maximum, Minimum, SetUnion

__all__ = ["Concatenate", "Counter", "JsonMergePatch", "Maximum", "Minimum", "SetUnion"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        from flagstone.config.fields import suggestion  # noqa: PLC0415 - only for the error

        near = "" if name.startswith("_") else suggestion(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return __all__
