"""Key schemas: the column names, number widths and decimal scales that the bytes of a key do not contain.

A schema never changes the bytes. It refuses parts of another type than the column's, and converts decoded parts to
the column's type. It consists of text, so it pickles, compares and can be stored in any metadata.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final, NamedTuple

from flagstone.errors import InvalidRequest
from flagstone.keys.tuples import MAX_DIGITS, KeyPart, decode, encode, key_range

_TYPE: Final = re.compile(
    r"(?P<name>bool|string|binary|date|timestamp|timestamp_ntz)|(?P<number>int|uint)(?P<bits>8|16|32|64)"
    r"|float(?P<float>32|64)|decimal\((?P<precision>\d+),\s*(?P<scale>-?\d+)\)"
)
_TYPES: Final = (
    "bool, int8 to int64, uint8 to uint64, float32, float64, decimal(precision,scale), date, timestamp, "
    "timestamp_ntz, string, binary"
)
_ARROW_NAMES: Final = {
    "float": "float32",
    "double": "float64",
    "large_string": "string",
    "string_view": "string",
    "large_binary": "binary",
    "binary_view": "binary",
    "date32[day]": "date",
    "date64[ms]": "date",
}
_PYTHON: Final[dict[str, tuple[type, ...]]] = {
    "bool": (bool,),
    "int": (int,),
    "uint": (int,),
    "float": (float, int),
    "decimal": (Decimal, int),
    "date": (date,),
    "timestamp": (datetime,),
    "timestamp_ntz": (datetime,),
    "string": (str,),
    "binary": (bytes, bytearray, memoryview),
}
_EXACTLY: Final = Context(prec=2 * MAX_DIGITS, traps=[Inexact, InvalidOperation])


class KeyType(NamedTuple):
    """The type of a key column: a kind, its bits (or a decimal's precision), and a decimal's scale."""

    kind: str
    size: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> KeyType:
        """The type with a name such as "int64" or "decimal(10,2)"; raises `InvalidRequest` for other names."""
        found = _TYPE.fullmatch(text.strip().lower())
        if found is None:
            raise InvalidRequest(f"a key column cannot have the type {text!r}; types are {_TYPES}")
        if found["name"]:
            return cls(found["name"])
        if found["number"]:
            return cls(found["number"], int(found["bits"]))
        if found["float"]:
            return cls("float", int(found["float"]))
        precision, scale = int(found["precision"]), int(found["scale"])
        if not 1 <= precision <= MAX_DIGITS or abs(scale) > 1_000:
            raise InvalidRequest(f"{text}: decimals have 1 to {MAX_DIGITS} digits and scales up to ±1000")
        return cls("decimal", precision, scale)

    def __str__(self) -> str:
        if self.kind == "decimal":
            return f"decimal({self.size},{self.scale})"
        return f"{self.kind}{self.size or ''}"

    def fit(self, part: Any) -> KeyPart:
        """The part converted to this type: an int to float, a float rounded to 32 bits, a decimal to its scale.

        Raises `InvalidRequest` if the part has another type or is out of range.
        """
        if part is None:
            return None
        if not self._describes(part):
            raise InvalidRequest(f"the part is a {type(part).__name__}, but the column's type is {self}")
        if self.kind in {"int", "uint"}:
            low, high = self.bounds
            if not low <= part <= high:
                raise InvalidRequest(f"{part} does not fit into {self}")
        elif self.kind == "float":
            return self._fit_float(part)
        elif self.kind == "decimal":
            return self._fit_decimal(Decimal(part))
        elif isinstance(part, datetime) and (part.utcoffset() is None) != (self.kind == "timestamp_ntz"):
            raise InvalidRequest(
                f"{part.isoformat()} has a time zone, but timestamp_ntz has none"
                if self.kind == "timestamp_ntz"
                else f"{part.isoformat()} has no time zone; a timestamp needs one"
            )
        return part  # type: ignore[no-any-return]

    def _describes(self, part: object) -> bool:
        if isinstance(part, bool):
            return self.kind == "bool"
        return isinstance(part, _PYTHON[self.kind]) and not (
            self.kind == "date" and isinstance(part, datetime)
        )

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest integer."""
        return (
            (0, 2**self.size - 1)
            if self.kind == "uint"
            else (-(2 ** (self.size - 1)), 2 ** (self.size - 1) - 1)
        )

    def _fit_float(self, part: float) -> float:
        try:
            return float(part) if self.size == 64 else struct.unpack("<f", struct.pack("<f", part))[0]
        except OverflowError:
            raise InvalidRequest(f"{part} does not fit into {self}") from None

    def _fit_decimal(self, part: Decimal) -> Decimal:
        try:
            fitted = part.quantize(Decimal((0, (1,), -self.scale)), context=_EXACTLY)
        except (Inexact, InvalidOperation):
            raise InvalidRequest(f"{part} does not fit into {self}") from None
        if fitted and fitted.adjusted() + 1 + self.scale > self.size:
            raise InvalidRequest(f"{part} does not fit into {self}")
        return fitted


class KeySchema:
    """The columns of a key, in order: `KeySchema({"region": "string", "id": "int64"})`.

    Types are bool, int8 to int64, uint8 to uint64, float32, float64, decimal(precision,scale), date, timestamp (with
    time zone), timestamp_ntz (without time zone), string and binary.
    """

    __slots__ = ("names", "types")

    def __init__(self, columns: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        pairs = list(columns.items() if isinstance(columns, Mapping) else columns)
        self.names: tuple[str, ...] = tuple(name for name, _ in pairs)
        self.types: tuple[KeyType, ...] = tuple(KeyType.parse(text) for _, text in pairs)
        if not pairs:
            raise InvalidRequest("a key needs at least one column")
        if len(set(self.names)) < len(self.names):
            raise InvalidRequest(f"a key has two columns of one name: {', '.join(self.names)}; rename one")

    @classmethod
    def of(cls, schema: Any) -> KeySchema:
        """The key columns of an Arrow schema; raises `InvalidRequest` for a type that cannot be part of a key."""
        return cls([(field.name, arrow_type_name(field.name, field.type)) for field in schema])

    @property
    def columns(self) -> dict[str, str]:
        """Names and types as text: `KeySchema(schema.columns) == schema`."""
        return {name: str(kind) for name, kind in zip(self.names, self.types, strict=True)}

    def encode(self, *parts: KeyPart | Sequence[KeyPart]) -> bytes:
        """The key of a row. With fewer parts than columns it is the common prefix of all keys with these parts.

        Raises `InvalidRequest` with the name of the column if a part has another type or does not fit.
        """
        return encode(self._fit(parts))

    def range(self, *parts: KeyPart | Sequence[KeyPart]) -> tuple[bytes, bytes]:
        """The key range of all rows that begin with these parts; see `keys.range`."""
        return key_range(self._fit(parts))

    def decode(self, key: bytes) -> tuple[KeyPart, ...]:
        """The parts of a key with these columns.

        Raises `CorruptData` if the bytes are not a key, and `InvalidRequest` if the key has other columns.
        """
        parts = decode(key)
        if len(parts) != len(self.names):
            raise InvalidRequest(f"the key has {len(parts)} parts, but the schema {len(self.names)}: {self}")
        fitted = self._fit(parts)
        for name, part, before in zip(self.names, fitted, parts, strict=True):
            if type(part) is not type(before) or (part != before and part == part):  # noqa: PLR0124 - NaN
                raise InvalidRequest(
                    f"column {name!r}: the key has the {type(before).__name__} {before!r}, not a {self.columns[name]}"
                )
        return fitted

    def _fit(self, parts: Sequence[Any]) -> tuple[KeyPart, ...]:
        chosen = parts[0] if len(parts) == 1 and isinstance(parts[0], (tuple, list)) else parts
        if len(chosen) > len(self.names):
            raise InvalidRequest(
                f"{len(chosen)} parts for {len(self.names)} columns: {', '.join(self.names)}"
            )
        fitted = []
        for name, kind, part in zip(self.names, self.types, chosen, strict=False):
            try:
                fitted.append(kind.fit(part))
            except InvalidRequest as problem:
                raise InvalidRequest(f"column {name!r}: {problem}") from None
        return tuple(fitted)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeySchema):
            return NotImplemented
        return (self.names, self.types) == (other.names, other.types)

    def __hash__(self) -> int:
        return hash((self.names, self.types))

    def __repr__(self) -> str:
        return f"KeySchema({self.columns})"


def arrow_type_name(name: str, kind: Any) -> str:
    """The key type of an Arrow type. A dictionary has the type of its values."""
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind
    text = str(kind)
    if text.startswith("timestamp["):
        return "timestamp" if kind.tz is not None else "timestamp_ntz"
    if text.startswith("decimal"):
        return str(KeyType.parse(f"decimal({kind.precision},{kind.scale})"))
    if text.startswith("fixed_size_binary["):
        return "binary"
    text = _ARROW_NAMES.get(text, text)
    try:
        return str(KeyType.parse(text))
    except InvalidRequest:
        raise InvalidRequest(
            f"column {name!r} has the type {kind}, which cannot be part of a key; types are {_TYPES}"
        ) from None
