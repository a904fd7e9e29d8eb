"""The law of merge operators: it does not matter when and in which groups operands are folded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.lsm.json_merge_patch import JsonMergePatch
from flagstone.lsm.merge_operator import MergeOperator, fold, fold_from_nothing
from flagstone.lsm.operators import Concatenate, Counter, Maximum, Minimum, SetUnion

pytestmark = pytest.mark.slow

KEY = b"key"

numbers = (st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)).map(Counter.encode)
members = st.lists(st.binary(max_size=3), max_size=4).map(SetUnion.encode)
# Few names, so that patches meet; objects below objects, so that replacing and deleting happen at every depth.
documents = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
texts = documents.map(lambda document: json.dumps(document).encode())

CASES: list[Any] = [
    pytest.param(Counter(), numbers, id="counter"),
    pytest.param(Concatenate(), st.binary(max_size=4), id="concatenate"),
    pytest.param(Concatenate(b"|"), st.binary(max_size=4), id="concatenate-separated"),
    pytest.param(SetUnion(), members, id="set-union"),
    pytest.param(Maximum(), st.binary(max_size=2), id="maximum"),
    pytest.param(Minimum(), st.binary(max_size=2), id="minimum"),
    pytest.param(JsonMergePatch(), texts, id="json-merge-patch"),
]


def fold_in_groups(operator: MergeOperator, operands: list[bytes], data: st.DataObject) -> list[bytes]:
    """The operands after random neighbours were folded without a base, several times over."""
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(operands) - 1))
        stop = data.draw(st.integers(start + 1, len(operands)))
        operands = [*operands[:start], fold(operator, KEY, None, operands[start:stop]), *operands[stop:]]
    return operands


@pytest.mark.parametrize(("operator", "values"), CASES)
@given(data=st.data())
def test_grouping_operands_changes_no_result(
    operator: MergeOperator, values: st.SearchStrategy[bytes], data: st.DataObject
) -> None:
    base = data.draw(values)
    operands = data.draw(st.lists(values, min_size=1, max_size=6))
    grouped = fold_in_groups(operator, operands, data)

    assert fold(operator, KEY, base, grouped) == fold(operator, KEY, base, operands)
    assert fold(operator, KEY, None, grouped) == fold(operator, KEY, None, operands)
    assert fold_from_nothing(operator, KEY, grouped) == fold_from_nothing(operator, KEY, operands)


@pytest.mark.parametrize(("operator", "values"), CASES)
@given(data=st.data())
def test_merging_operands_in_steps_onto_the_value_changes_no_result(
    operator: MergeOperator, values: st.SearchStrategy[bytes], data: st.DataObject
) -> None:
    base = data.draw(st.none() | values)
    operands = data.draw(st.lists(values, min_size=2, max_size=6))
    cut = data.draw(st.integers(1, len(operands) - 1))

    step = fold(operator, KEY, base, operands[:cut])
    assert fold(operator, KEY, step, operands[cut:]) == fold(operator, KEY, base, operands)


@pytest.mark.parametrize(("operator", "values"), CASES)
@given(data=st.data())
def test_merge_many_equals_merging_one_by_one(
    operator: MergeOperator, values: st.SearchStrategy[bytes], data: st.DataObject
) -> None:
    result = base = data.draw(st.none() | values)
    operands = data.draw(st.lists(values, min_size=1, max_size=6))
    for operand in operands:
        result = operator.merge(KEY, result, operand)

    assert result == fold(operator, KEY, base, operands)


def patched(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = patched(target.get(name), value)
    return target


@given(documents, st.lists(documents, min_size=1, max_size=5), st.data())
def test_json_merge_patches_follow_the_rfc(document: Any, patches: list[Any], data: st.DataObject) -> None:
    operator = JsonMergePatch()
    operands = [json.dumps(patch).encode() for patch in patches]
    grouped = fold_in_groups(operator, operands, data)
    on_document, on_nothing = document, {}
    for patch in patches:
        on_document, on_nothing = patched(on_document, patch), patched(on_nothing, patch)

    assert json.loads(fold(operator, KEY, json.dumps(document).encode(), grouped)) == on_document
    assert json.loads(fold_from_nothing(operator, KEY, grouped)) == on_nothing
