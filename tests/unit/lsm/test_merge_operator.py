"""Folding of operands, and the built-in merge operators."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from flagstone.errors import InternalError, InvalidRequest
from flagstone.lsm.json_merge_patch import JsonMergePatch
from flagstone.lsm.merge_operator import MergeOperator, check_operand, fold, fold_from_nothing
from flagstone.lsm.operators import Concatenate, Counter, Maximum, Minimum, SetUnion

KEY = b"key"


class Pairwise:
    """Has only the method of the protocol."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        return (existing or b"") + operand


class Strict:
    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        raise KeyError(operand)


class Closing(Pairwise):
    def finish(self, key: bytes, combined: bytes) -> bytes:
        return combined + b"."


class Broken(Pairwise):
    def finish(self, key: bytes, combined: bytes) -> bytes:
        raise KeyError(combined)


@pytest.mark.parametrize("operator", [Pairwise(), Concatenate()])
def test_operands_are_folded_from_old_to_new(operator: MergeOperator) -> None:
    assert fold(operator, KEY, b"base", [b"+1", b"+2", b"+3"]) == b"base+1+2+3"
    assert fold(operator, KEY, None, [b"+1", b"+2"]) == b"+1+2"


def test_merge_many_gets_all_operands_at_once() -> None:
    calls: list[tuple[bytes | None, list[bytes]]] = []

    class Fast(Pairwise):
        def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:
            calls.append((existing, list(operands)))
            return b"result"

    assert fold(Fast(), KEY, b"base", [b"1", b"2"]) == b"result"
    assert calls == [(b"base", [b"1", b"2"])]


def test_an_error_of_the_operator_has_a_note_with_the_key() -> None:
    with pytest.raises(KeyError) as failure:
        fold(Strict(), KEY, None, [b"x"])
    assert failure.value.__notes__ == ["raised by the merge operator Strict for key b'key'"]

    with pytest.raises(KeyError) as failure:
        fold_from_nothing(Broken(), KEY, [b"x"])
    assert failure.value.__notes__ == ["raised by the merge operator Broken for key b'key'"]


def test_finish_is_called_only_if_there_is_no_base() -> None:
    assert fold_from_nothing(Closing(), KEY, [b"1", b"2"]) == b"12."
    assert fold(Closing(), KEY, None, [b"1", b"2"]) == b"12"
    assert fold_from_nothing(Pairwise(), KEY, [b"1"]) == b"1"


def test_folding_no_operand_raises_internal_error() -> None:
    with pytest.raises(InternalError, match="nothing to fold"):
        fold(Concatenate(), KEY, b"base", [])


def test_an_operand_that_cannot_be_folded_is_refused_before_it_is_written() -> None:
    check_operand(Counter(), KEY, Counter.encode(1))
    with pytest.raises(InvalidRequest, match="merge_operator="):
        check_operand(None, KEY, b"1")
    with pytest.raises(InvalidRequest, match="not a counter"):
        check_operand(Counter(), KEY, b"1")
    with pytest.raises(InvalidRequest, match="refuses the operand for b'key'"):
        check_operand(Strict(), KEY, b"1")


def test_a_counter_adds_and_subtracts() -> None:
    total = fold(Counter(), KEY, Counter.encode(10), [Counter.encode(1), Counter.encode(-14)])

    assert total == b"\xfd\xff\xff\xff\xff\xff\xff\xff"
    assert Counter.decode(total) == -3
    assert Counter.encode(258) == b"\x02\x01\0\0\0\0\0\0"


@pytest.mark.parametrize("extreme", [2**63 - 1, -(2**63)])
def test_a_counter_beyond_64_bits_takes_more_bytes_and_shrinks_again(extreme: int) -> None:
    assert len(Counter.encode(extreme)) == 8
    beyond = fold(Counter(), KEY, Counter.encode(extreme), [Counter.encode(extreme)])

    assert Counter.decode(beyond) == 2 * extreme
    assert len(beyond) == 9
    assert fold(Counter(), KEY, beyond, [Counter.encode(-extreme)]) == Counter.encode(extreme)


def test_a_counter_refuses_a_base_that_is_not_a_counter() -> None:
    with pytest.raises(InvalidRequest, match=r"b'ten' at b'key' is not a counter; write Counter\.encode"):
        fold(Counter(), KEY, b"ten", [Counter.encode(1)])


def test_concatenate_puts_a_separator_between_operands() -> None:
    assert fold(Concatenate(b","), KEY, None, [b"a", b"b"]) == b"a,b"
    assert fold(Concatenate(b","), KEY, b"a,b", [b"c"]) == b"a,b,c"


def test_a_set_is_stored_sorted_and_without_duplicates() -> None:
    members = fold(SetUnion(), KEY, SetUnion.encode([b"b", b""]), [SetUnion.encode([b"b", b"a"])])

    assert members == b"\0\0\0\0" + b"\0\0\0\x01a" + b"\0\0\0\x01b"
    assert SetUnion.decode(members) == {b"", b"a", b"b"}


@pytest.mark.parametrize("operand", [b"x", b"\0\0\0", b"\0\0\0\x02a"])
def test_bytes_that_are_not_a_set_are_refused(operand: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"is not a set.* at b'key'; write SetUnion\.encode"):
        fold(SetUnion(), KEY, None, [operand])


def test_maximum_and_minimum_compare_bytes() -> None:
    assert fold(Maximum(), KEY, b"b", [b"a", b"ab"]) == b"b"
    assert fold(Maximum(), KEY, None, [b"a", b"ab"]) == b"ab"
    assert fold(Minimum(), KEY, b"b", [b"ab", b"a"]) == b"a"
    assert fold(Minimum(), KEY, None, [b"b"]) == b"b"


# The examples of RFC 7396, appendix A.
RFC_EXAMPLES: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(("document", "patch", "result"), RFC_EXAMPLES)
def test_json_patches_give_the_results_of_the_rfc(document: Any, patch: Any, result: Any) -> None:
    assert json.loads(fold(JsonMergePatch(), KEY, dump(document), [dump(patch)])) == result


def test_equal_documents_have_equal_bytes() -> None:
    merged = fold(JsonMergePatch(), KEY, b'{ "z": 1,\n "\xc3\xa9": 2.50 }', [b'{"a": null, "b": [1, 2]}'])

    assert merged == b'{"b":[1,2],"z":1,"\xc3\xa9":2.5}'


def test_combined_patches_still_delete_members_of_a_document() -> None:
    patches = fold(JsonMergePatch(), KEY, None, [b'{"a": 1, "b": 1}', b'{"a": null}'])

    assert fold(JsonMergePatch(), KEY, b'{"a": 0, "c": 0}', [patches]) == b'{"b":1,"c":0}'
    assert patches == b'\0{"a":null,"b":[1]}'


def test_a_patch_after_a_replacement_does_not_restore_the_replaced_document() -> None:
    patches = fold(JsonMergePatch(), KEY, None, [b'{"m": 5}', b'{"m": {"x": 1}}'])

    assert fold(JsonMergePatch(), KEY, b'{"m": {"old": 0}}', [patches]) == b'{"m":{"x":1}}'
    assert fold(JsonMergePatch(), KEY, None, [b"7", b'{"x": 1}']) == b'\0[{"x":1}]'


def test_patches_without_a_document_give_a_document_without_nulls() -> None:
    operands = [b'{"a": 1, "b": {"c": null, "d": 2}}', b'{"a": null}']

    assert fold_from_nothing(JsonMergePatch(), KEY, operands) == b'{"b":{"d":2}}'
    assert fold_from_nothing(JsonMergePatch(), KEY, [b"null"]) == b"null"
    assert JsonMergePatch().finish(KEY, b'{"a":null}') == b'{"a":null}'


@pytest.mark.parametrize(
    "operand", [b"", b"{", b"\xff", b"NaN", b"1e999", b'"\\ud800"', b"[" * 100_000, b"1" * 10_000]
)
def test_bytes_that_are_not_json_are_refused(operand: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot merge JSON at b'key'"):
        check_operand(JsonMergePatch(), KEY, operand)
