"""Builds the compiled kernels when a C compiler is there, and goes on without them when not.

Each kernel is an ordinary module `flagstone/kernels/_NAME.py`. Compiled, it is installed as
`flagstone.kernels._compiled._NAME`, so that both forms can live, and be compared, in one process.
"""

import os
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = (
    "_block_reader",
    "_block_writer",
    "_bloom",
    "_flat_reader",
    "_flat_writer",
    "_index",
    "_key_runs",
    "_lookup",
    "_memtable",
    "_memtable_streams",
    "_merge",
    "_probe",
    "_renumber",
    "_scan",
    "_sealing",
    "_tuple_reader",
    "_tuple_writer",
    "_value_rows",
    "_whole_blocks",
)
KERNEL_FOLDER = Path("src/flagstone/kernels")


class BuildKernelsIfPossible(build_ext):
    """A missing or broken compiler costs speed, never the installation."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                probe = Path(scratch, "probe.c")
                probe.write_text("#include <Python.h>\nint main(void) { return 0; }\n")
                self.compiler.compile([str(probe)], output_dir=scratch, include_dirs=self.include_dirs or [])
        except Exception as reason:  # whatever a broken toolchain raises
            print(f"flagstone: no working C compiler ({reason}); kernels will run interpreted")
            self.extensions = []
            return
        super().build_extensions()


def compiler_options():
    """The options for compiling and for linking. `make sanitize` asks for checks of every memory access."""
    if os.environ.get("FLAGSTONE_SANITIZE") == "1":
        checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        # The format has integers at odd addresses, and x86 and ARM read them.
        return ["-O1", "-g1", "-fno-omit-frame-pointer", *checks, "-fno-sanitize=alignment"], checks
    # Without debugging symbols, which would be four fifths of what is installed.
    return (["-O3", "-g0"], []) if os.name == "posix" else ([], [])


def kernel_extensions():
    if os.environ.get("FLAGSTONE_BUILD_KERNELS", "1") == "0":
        return []
    present = [name for name in KERNELS if (KERNEL_FOLDER / f"{name}.py").exists()]
    try:
        from Cython.Build import cythonize
    except ImportError as reason:
        print(f"flagstone: Cython is missing ({reason}); kernels will run interpreted")
        return []
    compiling, linking = compiler_options()
    extensions = [
        Extension(
            f"flagstone.kernels._compiled.{name}",
            [str(KERNEL_FOLDER / f"{name}.py")],
            extra_compile_args=compiling,
            extra_link_args=linking,
        )
        for name in present
    ]
    return cythonize(
        extensions,
        build_dir="build/kernels",
        # Where the `.pxd` files of `cython.cimports.flagstone.kernels` are; an installed Flagstone has others.
        include_path=["src"],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
        },
    )


setup(ext_modules=kernel_extensions(), cmdclass={"build_ext": BuildKernelsIfPossible})
