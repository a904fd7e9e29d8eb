"""Passwords in the URL of a commit log: which they are, and the URL without them."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

_SECRET_PARAMETERS: Final = frozenset(["password", "sslpassword"])


def without_password(url: str) -> str:
    """The URL without the password of its user, and without parameters that are passwords."""
    head, question, query = url.partition("?")
    scheme, separator, rest = head.partition("://")
    # The last @ ends the user: a password that holds one itself was not encoded, and must go as a whole.
    user, at, host = rest.rpartition("@")
    plain = f"{scheme}{separator}{user.partition(':')[0]}{at}{host}"
    kept = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if not _secret(name)]
    if len(kept) == len(parse_qsl(query, keep_blank_values=True)):
        return f"{plain}{question}{query}"
    return f"{plain}?{urlencode(kept)}" if kept else plain


def passwords_of(url: str) -> tuple[str, ...]:
    """The passwords in the URL, as written and decoded, longest first."""
    head, _, query = url.partition("?")
    user = head.partition("://")[2].rpartition("@")[0]
    written = [user.partition(":")[2]]
    written += [value for name, value in parse_qsl(query, keep_blank_values=True) if _secret(name)]
    found = {form for each in written if each for form in (each, unquote(each))}
    return tuple(sorted(found, key=len, reverse=True))


def _secret(parameter: str) -> bool:
    return parameter.lower() in _SECRET_PARAMETERS
