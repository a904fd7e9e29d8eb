"""Columns as pointers: the interpreted form. `_views.pxd` has the compiled form, see `_bytes`.

Compiled, a loop over pointers takes byte ranges that the shared functions copy. Interpreted, a column stands for its
own pointer.
"""

from __future__ import annotations


def bytes_of(column: memoryview) -> memoryview:
    """Where the bytes of the column begin; of an empty column, not to be read."""
    return column


def room_of(column: memoryview) -> memoryview:
    """Where the room of the column begins; of an empty column, not to be written."""
    return column
