"""Prints which form of the kernels this installation runs."""

from __future__ import annotations

import sys

from flagstone.kernels import COMPILED, LOCK_IS_OFF

if COMPILED:
    sys.stdout.write("kernels: compiled\n")
elif LOCK_IS_OFF:
    sys.stdout.write(
        "kernels: interpreted (compiled kernels rely on the interpreter lock, and -X gil=0 or PYTHON_GIL=0 switches it "
        "off); everything works, bulk work is 10 to 30 times slower. Start Python without that option to change that.\n"
    )
else:
    sys.stdout.write(
        "kernels: interpreted (this installation has no compiled ones, or FLAGSTONE_KERNELS=interpreted); everything "
        "works, bulk work is 10 to 30 times slower. Install a wheel for this platform, or a C compiler and then "
        "flagstone again from source, to change that.\n"
    )
