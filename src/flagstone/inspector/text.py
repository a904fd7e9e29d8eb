"""Keys, sizes and times as text for people and for JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def json_text(data: bytes) -> str:
    """Bytes for JSON: as text if they are UTF-8, otherwise 0x and hexadecimal digits."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
    return f"0x{data.hex()}" if text[:2].lower() == "0x" else text


def line_text(data: bytes) -> str:
    """Bytes for a line of text: as `json_text`, but as 0x… also if they have control characters."""
    text = json_text(data)
    return text if text.isprintable() else f"0x{data.hex()}"


def size_text(size: int) -> str:
    """A size for people, such as 1.5 MiB."""
    amount = float(size)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def time_text(seconds: float | None) -> str | None:
    """A time as RFC 3339 in UTC, with milliseconds if it has a fraction; None stays None."""
    if seconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds").replace(
        "+00:00", "Z"
    )
