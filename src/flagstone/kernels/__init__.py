"""The compiled part of the format: the same functions, compiled ahead of time where there was a C compiler.

Import kernels from here (`from flagstone.kernels import bloom`), never from their files. This module chooses the
compiled form when it is installed, and the interpreted form otherwise or with ``FLAGSTONE_KERNELS=interpreted`` in the
environment. Both forms give the same answers; property tests compare them. Compiled kernels rely on the interpreter
lock: a free-threaded Python switches it on when it imports them, and if it must not, the interpreted form is chosen.

Kernels are written in Cython's pure-Python mode: a file runs as it is, and compiles to C. A `bytes` object assigned to
a name annotated as a C pointer is that pointer when compiled and stays the object when interpreted; indexing means the
same in both. Constants of more than 31 bits are declared, because otherwise compiled code computes with them as Python
integers. Functions that several kernels use are inline functions in `.pxd` files, see `_bytes`.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Final

from flagstone.kernels.cython_stub import cython_stand_in, run_under_one_lock

if TYPE_CHECKING:
    from flagstone.kernels import _block_reader as block_reader
    from flagstone.kernels import _block_writer as block_writer
    from flagstone.kernels import _bloom as bloom
    from flagstone.kernels import _flat_reader as flat_reader
    from flagstone.kernels import _flat_writer as flat_writer
    from flagstone.kernels import _index as index
    from flagstone.kernels import _lookup as lookup
    from flagstone.kernels import _memtable as memtable
    from flagstone.kernels import _merge as merge
    from flagstone.kernels import _probe as probe
    from flagstone.kernels import _renumber as renumber
    from flagstone.kernels import _scan as scan
    from flagstone.kernels import _sealing as sealing
    from flagstone.kernels import _tuple_reader as tuple_reader
    from flagstone.kernels import _tuple_writer as tuple_writer
    from flagstone.kernels import _value_rows as value_rows
    from flagstone.kernels import _whole_blocks as whole_blocks


_SHARED_BY_THREADS: Final = ("memtable", "probe")
"""Kernels whose objects some threads read while others change them. Objects of other kernels belong to one thread."""


def load_interpreted(name: str) -> ModuleType:
    """The kernel as ordinary Python, whatever else is installed."""
    with cython_stand_in():
        module = importlib.import_module(f"flagstone.kernels._{name}")
    if name in _SHARED_BY_THREADS:
        run_under_one_lock(module)
    return module


def load_compiled(name: str) -> ModuleType | None:
    """The compiled kernel, or None where it was not built."""
    try:
        return importlib.import_module(f"flagstone.kernels._compiled._{name}")
    except ModuleNotFoundError:
        return None


LOCK_IS_OFF: Final = getattr(sys.flags, "gil", None) == 0
"""Whether `-X gil=0` or `PYTHON_GIL=0` keeps a free-threaded Python from switching its lock on for compiled kernels."""


def _choose(name: str) -> ModuleType:
    interpreted = LOCK_IS_OFF or os.environ.get("FLAGSTONE_KERNELS") == "interpreted"
    wanted = None if interpreted else load_compiled(name)
    return wanted or load_interpreted(name)


NAMES = (
    "block_reader",
    "block_writer",
    "bloom",
    "flat_reader",
    "flat_writer",
    "index",
    "lookup",
    "memtable",
    "merge",
    "probe",
    "renumber",
    "scan",
    "sealing",
    "tuple_reader",
    "tuple_writer",
    "value_rows",
    "whole_blocks",
)

_chosen = {name: _choose(name) for name in NAMES}
globals().update(_chosen)

COMPILED = all(module.__name__.startswith(f"{__name__}._compiled.") for module in _chosen.values())
FORM: Final = "compiled" if COMPILED else "interpreted"

__all__ = [
    "COMPILED",
    "FORM",
    "LOCK_IS_OFF",
    "NAMES",
    "block_reader",
    "block_writer",
    "bloom",
    "flat_reader",
    "flat_writer",
    "index",
    "load_compiled",
    "load_interpreted",
    "lookup",
    "memtable",
    "merge",
    "probe",
    "renumber",
    "scan",
    "sealing",
    "tuple_reader",
    "tuple_writer",
    "value_rows",
    "whole_blocks",
]
