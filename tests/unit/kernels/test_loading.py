"""Which form of the kernels is chosen, and that installing never depends on a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagstone.kernels import NAMES, load_compiled, load_interpreted

PROJECT = Path(__file__).parents[3]
compiled_here = pytest.mark.skipif(load_compiled("bloom") is None, reason="kernels were not compiled here")


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


@compiled_here
def test_compiled_kernels_are_chosen_where_they_exist() -> None:
    program = "from flagstone.kernels import COMPILED, block_reader; print(COMPILED, block_reader.__name__)"
    assert python(program, FLAGSTONE_KERNELS="") == "True flagstone.kernels._compiled._block_reader"


def test_the_environment_can_ask_for_interpreted_kernels() -> None:
    program = "from flagstone.kernels import COMPILED, block_reader; print(COMPILED, block_reader.__name__)"
    assert python(program, FLAGSTONE_KERNELS="interpreted") == "False flagstone.kernels._block_reader"


@compiled_here
def test_a_python_that_must_not_use_its_lock_gets_interpreted_kernels() -> None:
    # `sys.flags` cannot be changed: this stands for a free-threaded Python that was started with `-X gil=0`.
    program = (
        "import sys, types\n"
        "flags = types.SimpleNamespace(**{n: getattr(sys.flags, n) for n in dir(sys.flags) if n[0] != '_'})\n"
        "flags.gil = 0\n"
        "sys.flags = flags\n"
        "from flagstone.kernels import FORM, block_reader; print(FORM, block_reader.__name__)\n"
        "from flagstone.db.opening import INTERPRETED; print('gil=0' in INTERPRETED)\n"
        "import runpy; runpy.run_module('flagstone.kernels.__main__')"
    )
    said = python(program, FLAGSTONE_KERNELS="")

    assert said.startswith(
        "interpreted flagstone.kernels._block_reader\nTrue\nkernels: interpreted (compiled kernels"
    )


def test_windows_is_refused_with_the_reason_and_what_to_do() -> None:
    program = (
        "import os; os.name = 'nt'\n"
        "try:\n    import flagstone\n"
        "except ImportError as refused:\n    print(refused)"
    )
    said = python(program)

    assert said.startswith("Flagstone does not run on Windows")
    assert "flock" in said
    assert "WSL 2" in said


def test_interpreted_kernels_leave_no_fake_cython_behind() -> None:
    program = (
        "import sys, flagstone.kernels; print([name for name in sys.modules if name.startswith('cython')])"
    )
    assert python(program, FLAGSTONE_KERNELS="interpreted") == "[]"


@compiled_here
def test_both_forms_live_in_one_process() -> None:
    for name in NAMES:
        compiled, interpreted = load_compiled(name), load_interpreted(name)
        assert compiled is not None
        assert compiled is not interpreted
        public = {word for word in vars(interpreted) if not word.startswith("_") and word.islower()}
        # Without the functions that kernels share: compiled, those are C functions.
        own = {
            word
            for word in public
            if getattr(vars(interpreted)[word], "__module__", "") == interpreted.__name__
        }
        assert {word for word in own if callable(getattr(interpreted, word))} <= set(vars(compiled))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "/bin/false"])
def test_without_a_working_compiler_the_wheel_has_no_extensions_and_so_fits_every_machine(
    compiler: str,
) -> None:
    pytest.importorskip("Cython", reason="the build requirement is not in this environment")
    program = (
        "import runpy, setuptools\n"
        "setuptools.setup = lambda **options: print('extensions:', options['ext_modules'])\n"
        f"runpy.run_path({str(PROJECT / 'setup.py')!r})"
    )
    said = python(program, CC=compiler, FLAGSTONE_BUILD_KERNELS="1")

    assert "kernels will run interpreted" in said
    assert compiler in said
    assert said.endswith("extensions: []")
