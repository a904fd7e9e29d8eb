"""Keys and values in every readable form."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import keys
from flagstone.errors import InvalidRequest
from flagstone.inspector.decoding import SHORT, Decoder, parse_key
from flagstone.types import TOMBSTONE, VALUE

PLAIN = Decoder({})


def test_a_key_is_shown_as_text_tuple_or_hexadecimal() -> None:
    assert PLAIN.key(b"user/1")["label"] == "user/1"
    found = PLAIN.key(keys.encode("ada", 7, Decimal("1.5"), None))
    assert found["label"] == "(ada, 7, 1.5, None)"
    assert found["tuple"] == [["str", "ada"], ["int", "7"], ["Decimal", "1.5"], ["NoneType", "None"]]
    assert PLAIN.key(b"\xff\x00")["label"] == "0xff00"


def test_a_tombstone_has_no_value() -> None:
    assert PLAIN.row((b"k", 1, TOMBSTONE, b"", None, None))["value"] is None


def test_a_long_value_is_cut_between_letters() -> None:
    value = "é".encode() * SHORT
    shown = PLAIN.value(b"k", value, limit=SHORT + 1)
    assert shown["cut"]
    assert shown["text"] == "é" * (SHORT // 2)
    assert shown["bytes"] == len(value)


def test_json_that_is_nested_too_deeply_or_not_json_stays_text() -> None:
    assert PLAIN.value(b"k", b"[" * 30000, limit=10)["json"] is None
    assert PLAIN.value(b"k", b"{nothing", limit=10)["json"] is None


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_no_text_has_characters_that_no_screen_shows(key: bytes, value: bytes) -> None:
    row = json.loads(json.dumps(PLAIN.row((key, 1, VALUE, value, None, None))))
    for text in (row["key"]["label"], row["key"]["text"], *(part for _, part in row["key"]["tuple"] or [])):
        assert text is None or text.isprintable()
    for text in (row["value"]["text"], row["value"]["json"]):
        assert text is None or all(letter.isprintable() or letter in "\n\t" for letter in text)
    assert bytes.fromhex(row["key"]["id"]) == key


@given(st.lists(st.text(max_size=20) | st.integers(-(2**63), 2**64 - 1), max_size=4))
def test_a_tuple_that_was_typed_is_the_key_of_that_tuple(parts: list[str | int]) -> None:
    assert parse_key(json.dumps(parts), "tuple") == keys.encode(tuple(parts))


@pytest.mark.parametrize(
    ("text", "form", "key"),
    [
        ("0x00ff", "auto", b"\x00\xff"),
        ("é", "auto", "é".encode()),
        ("0x00", "text", b"0x00"),
        ("00 ff", "hex", b"\x00\xff"),
        ("", "tuple", b""),
    ],
)
def test_a_key_is_read_in_the_form_that_is_named(text: str, form: str, key: bytes) -> None:
    assert parse_key(text, form) == key


@pytest.mark.parametrize(
    ("text", "form"),
    [("\ud800", "text"), ("0xz", "auto"), ("{", "tuple"), ("[" * 9999, "tuple"), ("a", "no")],
    ids=["surrogate", "digit", "brace", "depth", "form"],
)
def test_a_key_of_another_form_is_refused(text: str, form: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_key(text, form)
