"""The compiled and the interpreted form of kernels, for tests that compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.types import EntryTuple


def forms_of(name: str) -> list[str]:
    """The forms of a kernel that exist here."""
    return ["interpreted"] if load_compiled(name) is None else ["compiled", "interpreted"]


def both(name: str) -> tuple[ModuleType, ModuleType]:
    """The compiled and the interpreted form of a kernel."""
    compiled = load_compiled(name)
    assert compiled is not None
    return compiled, load_interpreted(name)


@contextmanager
def replaced_kernels(form: str, uses: Mapping[tuple[Any, str], str]) -> Iterator[None]:
    """Use one form of the kernels; `uses` maps a module and the name in it to the kernel."""
    load = load_compiled if form == "compiled" else load_interpreted
    before = {use: getattr(*use) for use in uses}
    try:
        for (module, name), kernel in uses.items():
            setattr(module, name, load(kernel))
        yield
    finally:
        for (module, name), kernel in before.items():
            setattr(module, name, kernel)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or the type and text of the error it raises."""
    try:
        return function(*arguments)
    except (CorruptData, InvalidRequest) as error:
        return type(error), str(error)


def damaged(raw: bytes, changes: Sequence[tuple[int, int]], cut: int) -> bytes:
    """The bytes with some of them changed, and without the last `cut` ones."""
    copy = bytearray(raw)
    for index, byte in changes:
        copy[index % len(copy)] = byte
    return bytes(copy[: len(copy) - cut])


def blocks_of(rows: list[EntryTuple], size: int = 1024) -> list[bytes]:
    """The rows as encoded blocks."""
    writer = load_interpreted("block_writer").BlockWriter(size)
    writer.add_rows(rows)
    blocks: list[bytes] = writer.finish_blocks()
    return blocks
