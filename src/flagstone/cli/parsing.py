"""Parses options (ids, durations, times, merge operators, keys), and formats keys and values for output."""

from __future__ import annotations

import base64
import binascii
import importlib
import re
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from flagstone.errors import InvalidRequest
from flagstone.inspector.text import json_text, line_text
from flagstone.runtime.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from flagstone.lsm.merge_operator import MergeOperator

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?")
_OPERATORS: Final = {
    "counter": "flagstone.lsm.operators:Counter",
    "concatenate": "flagstone.lsm.operators:Concatenate",
    "set-union": "flagstone.lsm.operators:SetUnion",
    "maximum": "flagstone.lsm.operators:Maximum",
    "minimum": "flagstone.lsm.operators:Minimum",
    "json-merge-patch": "flagstone.lsm.json_merge_patch:JsonMergePatch",
}


def parse_moment(text: str) -> datetime:
    """A time: RFC 3339 (UTC if it has no time zone), "now", a duration and "ago", or @ and seconds since the epoch.

    The @ may be missing where a number cannot be a sequence number.

    Raises:
        InvalidRequest: the text is none of these.

    """
    words = text.strip()
    now = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC)
    if words == "now":
        return now
    try:
        if words.endswith("ago"):
            ago = parse_duration(words.removesuffix("ago"))
            return now - ago
        if _NUMBER.fullmatch(words.removeprefix("@")):
            return datetime.fromtimestamp(float(words.removeprefix("@")), UTC)
        moment = datetime.fromisoformat(words)
    except InvalidRequest:
        raise
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f'{text!r} is not a time; write 2026-11-16T03:00:00Z, "2h ago", now, or @ and seconds since the epoch'
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def parse_as_of(text: str | None) -> int | datetime | None:
    """An earlier state: a sequence number, or a time as `parse_moment` reads it; None stays None."""
    if text is None:
        return None
    return int(text) if text.isascii() and text.isdigit() else parse_moment(text)


def parse_duration(text: str) -> timedelta:
    """A duration such as "7days 30min"."""
    # Imported here, because it imports all settings, which `--help` does not need.
    from flagstone.config import durations

    return durations.parse_duration(text)


def parse_lifetime(text: str | None) -> timedelta | None:
    """A duration; None stays None."""
    return None if text is None else parse_duration(text)


def parse_merge_operator(name: str | None) -> MergeOperator | None:
    """The built-in operator of that name, or the one at `module:attribute`; a class is instantiated.

    Raises:
        InvalidRequest: there is no such operator, or it has no method `merge`.

    """
    if name is None:
        return None
    module, colon, attribute = _OPERATORS.get(name, name).partition(":")
    if not colon:
        raise InvalidRequest(f"no merge operator {name!r}; use {', '.join(_OPERATORS)} or module:attribute")
    # As with `python -m`, modules in the current folder are found.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(f"cannot load the merge operator {name}: {error}") from None
    operator = found() if isinstance(found, type) else found
    if not callable(getattr(operator, "merge", None)):
        raise InvalidRequest(f"the merge operator {name} has no method merge(key, existing, operand)")
    return cast("MergeOperator", operator)


class KeyForm(StrEnum):
    """How keys are written on the command line and in the output."""

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
    """The bytes of `text` in this form; `auto` is hexadecimal if the text begins with 0x, and text otherwise.

    Raises:
        InvalidRequest: the text does not have that form.

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
                # Python escapes the bytes of an argument that is not UTF-8; this restores them.
                return text.encode(errors="surrogateescape")
    except (ValueError, binascii.Error):
        raise InvalidRequest(f"the {what} {text!r} is not {_named(form)}") from None


def key_form(*, hex_given: bool, base64_given: bool, default: KeyForm = KeyForm.utf8) -> KeyForm:
    """The form that `--hex` and `--base64` ask for."""
    if hex_given and base64_given:
        raise InvalidRequest("--hex and --base64 exclude each other; use one of them")
    return KeyForm.hex if hex_given else KeyForm.base64 if base64_given else default


def screen_text(data: bytes) -> str:
    """Bytes for a terminal: text with its lines and tabs, or 0x… if a character could control the terminal."""
    text = json_text(data)
    harmless = all(letter.isprintable() or letter in "\n\t" for letter in text)
    return text if harmless else f"0x{data.hex()}"


def show_key(key: bytes, form: KeyForm, *, for_json: bool) -> str:
    """A key as the output shows it."""
    return _show(key, form.value, for_json=for_json)


def show_value(value: bytes, form: ValueForm, *, for_json: bool) -> str | int | None:
    """A value as the output shows it; None if the form leaves it out."""
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
