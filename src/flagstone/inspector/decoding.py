"""Keys and values in every form that a reader of the page may know them by: text, JSON, tuples, columns. Pure.

Any process that writes to the database chooses these bytes. The texts have no control characters and none that change
the direction of writing, but they may be markup: the page inserts them as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from flagstone import keys
from flagstone import schema as schemas
from flagstone.errors import CorruptData, FlagstoneError, InvalidRequest
from flagstone.types import MERGE, TOMBSTONE, EntryTuple

if TYPE_CHECKING:
    from flagstone.schema import TableReader, TableSchema

SHORT: Final = 240
"""The bytes of a key or value that a list shows."""

LONG: Final = 32 << 10
"""The bytes of a value that the page of one key shows."""

_KINDS: Final = {MERGE: "operand", TOMBSTONE: "tombstone"}
_LINES: Final = "\n\t"


class Decoder:
    """Decodes by the stored schemas of a database. `stored` are those of `Admin.schemas`."""

    def __init__(self, stored: Mapping[bytes, TableSchema]) -> None:
        # The longest prefix first: the schema of a collection before that of the whole database.
        self._schemas = sorted(stored.items(), key=lambda item: -len(item[0]))
        self._readers: dict[bytes, TableReader] = {}

    def key(self, key: bytes) -> dict[str, Any]:
        """A key: `id` names it in requests, `label` is its shortest readable form."""
        parts = _tuple(key)
        text = _text(key, lines=False)
        label = text if text is not None else _tuple_label(parts) if parts else f"0x{key[:SHORT].hex()}"
        return {
            "id": key.hex(),
            "label": _shorten(label),
            "bytes": len(key),
            "text": None if text is None else _shorten(text),
            "tuple": parts,
            "hex": key[:SHORT].hex(),
        }

    def row(self, row: EntryTuple, *, limit: int = SHORT) -> dict[str, Any]:
        """A stored row: its key, kind, sequence number, times, and its value in every form that fits."""
        key, seq, kind, value, created_ms, expires_ms = row
        return {
            "key": self.key(key),
            "seq": seq,
            "kind": _KINDS.get(kind, "value"),
            "created_ms": created_ms,
            "expires_ms": expires_ms,
            "value": None if kind == TOMBSTONE else self.value(key, value, limit=limit),
        }

    def value(self, key: bytes, value: bytes, *, limit: int = SHORT) -> dict[str, Any]:
        """A value. What is longer than `limit` is cut, and `cut` says so."""
        shown = value[:limit]
        return {
            "bytes": len(value),
            "cut": len(value) > limit,
            "text": _text(shown, cut=len(value) > limit),
            "json": _json(value) if len(value) <= LONG else None,
            "columns": self._columns(key, value, limit),
            "hex": shown.hex(),
        }

    def _columns(self, key: bytes, value: bytes, limit: int) -> list[list[str]] | None:
        for prefix, schema in self._schemas:
            if key.startswith(prefix):
                try:
                    found = self._reader(prefix, schema).decode(key, value)
                except (CorruptData, InvalidRequest):
                    return None  # a row of another shape than its schema: its other forms show what it is
                return [[name, _part(part, limit)] for name, part in found.items()]
        return None

    def _reader(self, prefix: bytes, schema: TableSchema) -> TableReader:
        if prefix not in self._readers:
            self._readers[prefix] = schemas.TableReader(schema, prefix=prefix)
        return self._readers[prefix]


def parse_key(text: str, form: str) -> bytes:
    """The bytes that a person typed: as text, hexadecimal digits, or a tuple written as a JSON array.

    Raises:
        InvalidRequest: the text does not have that form.

    """
    if form == "auto":
        form = "hex" if text[:2].lower() == "0x" else "text"
    try:
        if form == "text":
            return text.encode()
        if form == "hex":
            return bytes.fromhex(text[2:] if text[:2].lower() == "0x" else text)
        if form == "tuple":
            parts = json.loads(text) if text.lstrip().startswith("[") else [json.loads(text)] if text else []
            return keys.encode(tuple(parts))
    except (ValueError, RecursionError, UnicodeEncodeError):
        raise InvalidRequest(f"{_shorten(text)!r} is not {_FORMS[form]}") from None
    raise InvalidRequest(f"a key is given as {', '.join(_FORMS)}, not as {form[:20]!r}")


_FORMS: Final = {
    "text": "text",
    "hex": "hexadecimal, such as 0x00ff",
    "tuple": 'a tuple, such as ["user", 42]',
}


def _text(data: bytes, *, lines: bool = True, cut: bool = False) -> str | None:
    """UTF-8 as text; None if it is not, or holds characters that are not printable."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        # A cut may be within a letter.
        if not cut or error.start < len(data) - 3:
            return None
        text = data[: error.start].decode()
    kept = _LINES if lines else ""
    return text if all(letter.isprintable() or letter in kept for letter in text) else None


def _json(value: bytes) -> str | None:
    if value[:1] not in (b"{", b"["):
        return None
    try:
        found = json.loads(value)
        # Other letters than ASCII stay readable; those that no screen shows, such as direction marks, are escaped.
        text = json.dumps(found, indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return "".join(
        letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text
    )


def _tuple(key: bytes) -> list[list[str]] | None:
    try:
        found = keys.decode(key)
    except FlagstoneError:
        return None
    return [[type(part).__name__, _part(part, SHORT)] for part in found] or None


def _tuple_label(parts: list[list[str]]) -> str:
    return f"({', '.join(text for _, text in parts)})"


def _part(part: Any, limit: int) -> str:
    if isinstance(part, str):
        text = part[:limit]
        return text if text.isprintable() else json.dumps(text)
    if isinstance(part, bytes):
        return f"0x{part[:limit].hex()}"
    text = str(part)[:limit]
    return text if text.isprintable() else ascii(text)


def _shorten(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"
