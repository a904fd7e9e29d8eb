"""Prints which form of the kernels this installation runs."""

from __future__ import annotations

import sys

from flagstone.kernels import COMPILED

if COMPILED:
    sys.stdout.write("kernels: compiled\n")
else:
    sys.stdout.write(
        "kernels: interpreted (no C compiler was found at install time, or FLAGSTONE_KERNELS=interpreted); "
        "everything works, bulk work is 10 to 30 times slower. Install a C compiler and reinstall to change that.\n"
    )
