"""Builds the compiled kernels when a C compiler is there, and goes on without them when not.

Each kernel is an ordinary module `flagstone/kernels/_NAME.py`. Compiled, it is installed as
`flagstone.kernels._compiled._NAME`, so that both forms can live, and be compared, in one process.

Without kernels the wheel is pure Python, and its tag is `py3-none-any`: it fits every Python and every machine. That
is what a machine without a C compiler builds, and what FLAGSTONE_BUILD_KERNELS=0 asks for.
"""

import os
import tempfile
from pathlib import Path

from setuptools import Distribution, Extension, setup
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


class BuildKernels(build_ext):
    """Compiles on all cores."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()


def compile_a_probe():
    """Build an extension of one line. It raises what compiling the kernels would raise where no compiler works."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        source.write_text("#include <Python.h>\nPyMODINIT_FUNC PyInit_probe(void) { return NULL; }\n")
        probe = Distribution({"name": "probe", "ext_modules": [Extension("probe", [str(source)])]})
        command = build_ext(probe)
        command.build_lib = command.build_temp = scratch
        command.finalize_options()
        command.run()


def compiler_options():
    """The options for compiling and for linking. `make sanitize` asks for checks of every memory access."""
    if os.environ.get("FLAGSTONE_SANITIZE") == "1":
        checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        # The format has integers at odd addresses, and x86 and ARM read them.
        return ["-O1", "-g1", "-fno-omit-frame-pointer", *checks, "-fno-sanitize=alignment"], checks
    # Without debugging symbols, which would be four fifths of what is installed.
    return (["-O3", "-g0"], []) if os.name == "posix" else ([], [])


def kernel_extensions():
    """The kernels to compile; none where that is impossible, which costs speed but never the installation.

    This is decided before `setup`, because a wheel with extensions gets the tag of this Python and this machine.
    """
    if os.environ.get("FLAGSTONE_BUILD_KERNELS", "1") == "0":
        return []
    present = [name for name in KERNELS if (KERNEL_FOLDER / f"{name}.py").exists()]
    try:
        from Cython.Build import cythonize

        compile_a_probe()
    except (Exception, SystemExit) as reason:  # whatever a broken toolchain raises
        print(f"flagstone: kernels will run interpreted, because they cannot be compiled here: {reason}")
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


setup(ext_modules=kernel_extensions(), cmdclass={"build_ext": BuildKernels})
