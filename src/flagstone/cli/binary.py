"""Keys and values as text, and back: the one rule that tables and JSON share.

Bytes are shown as the text they spell. What spells none is shown as `0x` and hexadecimal digits, and so is text
that itself begins with `0x`: a leading `0x` always means hexadecimal, nothing is ambiguous, and everything can be
turned back. In a line of text control characters count as binary, too; JSON has its own way to write them.
"""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum

from flagstone.errors import InvalidRequest
from flagstone.inspector.text import json_text, line_text


class KeyForm(StrEnum):
    """How keys are written, on the command line and in the output."""

    auto = "auto"
    utf8 = "utf8"
    hex = "hex"
    base64 = "base64"


class ValueForm(StrEnum):
    """How values are written in the output."""

    auto = "auto"
    utf8 = "utf8"
    hex = "hex"
    base64 = "base64"
    len = "len"
    none = "none"


def parse_bytes(text: str, form: KeyForm, *, what: str = "key") -> bytes:
    """The bytes that `text` stands for; `auto` is text, unless it begins with 0x.

    Raises:
        InvalidRequest: it is not of that form.

    """
    if form is KeyForm.auto:
        form = KeyForm.hex if text[:2].lower() == "0x" else KeyForm.utf8
    try:
        match form:
            case KeyForm.hex:
                return bytes.fromhex(text[2:] if text[:2].lower() == "0x" else text)
            case KeyForm.base64:
                return base64.b64decode(text, validate=True)
            case _:
                # An argument that is not UTF-8 arrives with its bytes escaped, and leaves with them.
                return text.encode(errors="surrogateescape")
    except (ValueError, binascii.Error):
        raise InvalidRequest(f"the {what} {text!r} is not {_named(form)}") from None


def key_form(*, hex_given: bool, base64_given: bool, default: KeyForm = KeyForm.utf8) -> KeyForm:
    """The form that `--hex` and `--base64` ask for."""
    if hex_given and base64_given:
        raise InvalidRequest("a key is --hex or --base64, not both")
    return KeyForm.hex if hex_given else KeyForm.base64 if base64_given else default


def screen_text(data: bytes) -> str:
    """Bytes for a terminal: text with its lines and tabs; anything that could control the terminal as digits."""
    text = json_text(data)
    harmless = all(letter.isprintable() or letter in "\n\t" for letter in text)
    return text if harmless else f"0x{data.hex()}"


def show_key(key: bytes, form: KeyForm, *, for_json: bool) -> str:
    """A key as the output shows it."""
    return _show(key, form.value, for_json=for_json)


def show_value(value: bytes, form: ValueForm, *, for_json: bool) -> str | int | None:
    """A value as the output shows it; None when it is left out."""
    match form:
        case ValueForm.none:
            return None
        case ValueForm.len:
            return len(value) if for_json else f"{len(value)} bytes"
        case ValueForm.auto if not for_json:
            text = line_text(value)
            return text if text.encode() == value else f"<binary {len(value)} bytes>"
        case _:
            return _show(value, form.value, for_json=for_json)


def _show(data: bytes, form: str, *, for_json: bool) -> str:
    match form:
        case "hex":
            return f"0x{data.hex()}"
        case "base64":
            return base64.b64encode(data).decode()
        case "utf8":
            return data.decode(errors="replace")
        case _:
            return json_text(data) if for_json else line_text(data)


def _named(form: KeyForm) -> str:
    return {KeyForm.hex: "hexadecimal", KeyForm.base64: "base64"}.get(form, "text")
