"""Ready-made merge operators, for `flagstone.open(..., merge_operator=flagstone.operators.Counter())`.

Counter            adds numbers
Minimum, Maximum   keep the smaller or the larger value
Concatenate        appends
SetUnion           adds members to a set
JsonMergePatch     changes members of a JSON document
"""

from __future__ import annotations

from flagstone.lsm.json_merge_patch import JsonMergePatch
from flagstone.lsm.operators import Concatenate, Counter, Maximum, Minimum, SetUnion

__all__ = ["Concatenate", "Counter", "JsonMergePatch", "Maximum", "Minimum", "SetUnion"]
