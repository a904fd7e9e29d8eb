"""What opening a database for writing and for reading have in common: its options, and what is worth a warning."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from flagstone.config.fields import suggestion
from flagstone.db.mapping import NotSupported
from flagstone.kernels import COMPILED, LOCK_IS_OFF

_P = ParamSpec("_P")
_T = TypeVar("_T")

INTERPRETED: Final = (
    "flagstone was installed without a C compiler: its kernels run interpreted, 10 to 30 times slower. Install a C "
    "compiler and install flagstone again; or set FLAGSTONE_KERNELS=interpreted to accept it"
    if not LOCK_IS_OFF
    else "-X gil=0 or PYTHON_GIL=0 switches off the interpreter lock, on which compiled kernels rely: the kernels of "
    "flagstone run interpreted, 10 to 30 times slower. Start Python without that option; or set "
    "FLAGSTONE_KERNELS=interpreted to accept it"
)

_warned: set[str] = set()


def suggests_options(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let a function answer an unknown option with the most similar one. `name` is its public name."""

    def decorated(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = inspect.signature(function).parameters

        @wraps(function)
        def call(*args: _P.args, **options: _P.kwargs) -> _T:
            for option in options:
                if option not in known:
                    raise NotSupported(f"{name} has no option {option!r}{suggestion(option, known)}")
            return function(*args, **options)

        return call

    return decorated


def warn_if_interpreted() -> None:
    """Warn once per process if the kernels are interpreted, unless the environment chose that."""
    if COMPILED or os.environ.get("FLAGSTONE_KERNELS") == "interpreted" or INTERPRETED in _warned:
        return
    _warned.add(INTERPRETED)
    # The caller of the caller's decorator: the line that opens the database.
    warnings.warn(INTERPRETED, RuntimeWarning, stacklevel=4)
