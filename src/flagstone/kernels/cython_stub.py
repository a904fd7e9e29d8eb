"""Stands in for the `cython` module, and for the interpreter lock, where kernels run as ordinary Python.

Only the few names our kernels use, each doing nothing. Annotations are never evaluated (the kernels import
`annotations` from `__future__`), so C types need no stand-in. Shipping this keeps Cython a build-time tool.

A compiled method holds the interpreter lock from its first to its last line, and the kernels whose objects several
threads share rely on that. Interpreted, another thread may run between any two steps: `run_under_one_lock` gives such a
kernel the same guarantee.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any, Final, TypeVar

Decorated = TypeVar("Decorated")

SHARED: Final = (
    "_block_notes",
    "_bytes",
    "_crc32",
    "_entries",
    "_key_codes",
    "_memory",
    "_merge_source",
    "_records",
    "_rows",
    "_siphash",
    "_views",
)
"""The modules whose functions kernels share. When kernels are compiled, the `.pxd` files take their place."""


def _unchanged(thing: Decorated) -> Decorated:
    return thing


def _decorator(*_: object, **__: object) -> Callable[[Decorated], Decorated]:
    return _unchanged


class _NoGil:
    """`cython.nogil`, as a decorator and as a block: interpreted code never gives up the lock."""

    def __call__(self, thing: Decorated) -> Decorated:
        return thing

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _build() -> dict[str, ModuleType]:
    cython: Any = ModuleType("cython")
    cython.compiled = False
    cython.NULL = None
    cython.cfunc = cython.ccall = cython.inline = cython.cclass = _unchanged
    cython.exceptval = _decorator
    cython.nogil = _NoGil()
    cython.int = cython.uint = cython.longlong = cython.ulonglong = cython.Py_ssize_t = int
    cython.cast = cython.declare = lambda _type, value: value
    cython.address = _unchanged
    string: Any = ModuleType("cython.cimports.libc.string")
    # Only ever called behind `if cython.compiled`.
    string.memcpy = string.memcmp = string.memmove = None
    stdlib: Any = ModuleType("cython.cimports.libc.stdlib")
    stdlib.calloc = stdlib.malloc = stdlib.realloc = stdlib.free = None
    buffer: Any = ModuleType("cython.cimports.cpython.buffer")
    buffer.PyBUF_READ = buffer.PyBUF_WRITE = 0
    view: Any = ModuleType("cython.cimports.cpython.memoryview")
    view.PyMemoryView_FromMemory = None
    modules: dict[str, ModuleType] = {
        "cython": cython,
        "cython.cimports.cpython.buffer": buffer,
        "cython.cimports.cpython.memoryview": view,
        "cython.cimports.libc.string": string,
        "cython.cimports.libc.stdlib": stdlib,
    }
    for package in ("", ".cpython", ".flagstone", ".flagstone.kernels", ".libc"):
        modules[f"cython.cimports{package}"] = ModuleType(f"cython.cimports{package}")
    for shared in SHARED:
        name = f"flagstone.kernels.{shared}"
        modules[f"cython.cimports.{name}"] = importlib.import_module(name)
    return modules


@contextmanager
def cython_stand_in() -> Iterator[None]:
    """Inside the block `import cython` finds the stand-in; afterwards everything is as it was."""
    stand_in = _build()
    before = {name: sys.modules.get(name) for name in stand_in}
    sys.modules.update(stand_in)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# One for all kernels, as the interpreter lock is. Reentrant: a garbage collection may run code that reads, in the
# middle of a method.
_lock = RLock()


def _renew_lock() -> None:
    """In a forked child: the thread that held the lock is not there to give it back."""
    global _lock  # noqa: PLW0603
    _lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with _lock:
            return function(*arguments, **options)

    return call


def run_under_one_lock(module: ModuleType) -> None:
    """Let every public function and method of an interpreted kernel run as a whole, as its compiled form does."""
    for name, member in list(vars(module).items()):
        if getattr(member, "__module__", None) != module.__name__ or hasattr(member, "__wrapped__"):
            continue
        if isinstance(member, FunctionType) and not name.startswith("_"):
            setattr(module, name, _locked(member))
        elif isinstance(member, type):
            for attribute, method in list(vars(member).items()):
                public = not attribute.startswith("_") or attribute in ("__init__", "__len__")
                if isinstance(method, FunctionType) and public and not hasattr(method, "__wrapped__"):
                    setattr(member, attribute, _locked(method))
