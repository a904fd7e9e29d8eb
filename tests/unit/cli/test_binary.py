"""Bytes as text: the output parses back to the same bytes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from flagstone.cli.parsing import KeyForm, ValueForm, parse_bytes, screen_text, show_key, show_value
from flagstone.inspector.text import json_text, line_text


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@example(b"0x41")
@example(b"0X")
@example("é\n".encode())
@example(b"")
def test_shown_keys_parse_back_to_the_same_bytes(data: bytes) -> None:
    assert parse_bytes(json_text(data), KeyForm.auto) == data
    assert parse_bytes(line_text(data), KeyForm.auto) == data
    for form in (KeyForm.auto, KeyForm.hex, KeyForm.base64):
        assert parse_bytes(show_key(data, form, for_json=True), form) == data
        assert parse_bytes(show_key(data, form, for_json=False), form) == data


@given(st.binary(max_size=40))
def test_shown_keys_and_values_have_no_line_break(data: bytes) -> None:
    for form in (KeyForm.auto, KeyForm.hex, KeyForm.base64):
        assert len(show_key(data, form, for_json=False).splitlines()) <= 1
    for shown in (ValueForm.auto, ValueForm.hex, ValueForm.base64, ValueForm.len):
        assert len(str(show_value(data, shown, for_json=False)).splitlines()) <= 1


def test_printable_text_is_shown_unchanged() -> None:
    assert line_text("Müller/7".encode()) == "Müller/7"
    assert json_text(b'{\n "a": 1}') == '{\n "a": 1}'
    assert line_text(b"a\tb") == "0x610962"
    assert show_value(b"\x00", ValueForm.auto, for_json=False) == "<binary 1 bytes>"
    assert show_value(b"\x00", ValueForm.auto, for_json=True) == "\x00"
    assert show_value(b"\xff", ValueForm.auto, for_json=True) == "0xff"
    assert show_value(b"\x00", ValueForm.len, for_json=True) == 1


def test_screen_text_keeps_lines_and_escapes_control_sequences() -> None:
    assert screen_text(b'{\n\t"a": 1\n}') == '{\n\t"a": 1\n}'
    assert screen_text(b"\x1b[2J") == "0x1b5b324a"
    assert screen_text(b"\xff") == "0xff"


def test_an_argument_that_is_not_utf8_keeps_its_bytes() -> None:
    given_by_the_shell = b"\xff\xfe".decode(errors="surrogateescape")
    assert parse_bytes(given_by_the_shell, KeyForm.utf8) == b"\xff\xfe"
