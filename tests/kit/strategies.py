"""Hypothesis strategies for rows: small alphabets, so that prefixes, versions and boundaries really occur."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from flagstone.lsm.system_rows import is_system
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, VALUE, EntryTuple

KEY_BYTES: Final = b"\009AZ\\ab\xff"
"""The bytes of short keys. They include the least and the greatest byte, and bytes on both sides of the backslash."""

times: st.SearchStrategy[int | None] = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))
seqs: st.SearchStrategy[int] = st.integers(0, MAX_SEQ)


def short_keys(*, max_size: int) -> st.SearchStrategy[bytes]:
    """Keys of few different bytes: many share a prefix, and many differ by a trailing zero byte only."""
    return st.lists(st.sampled_from(KEY_BYTES), min_size=1, max_size=max_size).map(bytes)


neighbours: st.SearchStrategy[bytes] = st.sampled_from(
    [
        b"\0",
        b"0",
        b"A",
        b"\\",
        b"a",
        b"a\0",
        b"a\0\0",
        b"a0",
        b"aZ",
        b"a\\",
        b"a\\0",
        b"ab",
        b"a\xff",
        b"\xff",
    ]
)
"""A few keys, most of which lie between one key and the next that is easily mistaken for its successor."""

user_keys: st.SearchStrategy[bytes] = st.binary(min_size=1, max_size=12).filter(
    lambda key: not is_system(key)
)
"""Short keys that an application may write. Hypothesis also tries constants of the code, such as reserved keys."""

keys: st.SearchStrategy[bytes] = st.one_of(
    user_keys,
    neighbours,
    short_keys(max_size=6),
    st.integers(0, 300).map(lambda number: b"%08d" % number),
    st.integers(100, 700).map(lambda size: b"k" * size),
)
values: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=20), st.integers(0, 6000).map(lambda size: b"v" * size)
)


@st.composite
def entries(draw: st.DrawFn) -> EntryTuple:
    """One row of any kind."""
    kind = draw(st.sampled_from([VALUE, VALUE, VALUE, TOMBSTONE, MERGE]))
    value = b"" if kind == TOMBSTONE else draw(values)
    return (draw(keys), draw(seqs), kind, value, draw(times), draw(times))


def sorted_entries(*, min_size: int = 0, max_size: int = 80) -> st.SearchStrategy[list[EntryTuple]]:
    """Rows as a compacted SST holds them: by key, then by descending sequence number, each pair once."""
    return st.lists(
        entries(), min_size=min_size, max_size=max_size, unique_by=lambda row: (row[0], row[1])
    ).map(lambda rows: sorted(rows, key=lambda row: (row[0], -row[1])))
