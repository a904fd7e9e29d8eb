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
def test_a_missing_compiler_costs_speed_not_the_installation(tmp_path: Path) -> None:
    pytest.importorskip("Cython", reason="the build requirement is not in this environment")
    done = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "build_ext",
            "--build-lib",
            str(tmp_path / "lib"),
            "--build-temp",
            str(tmp_path),
        ],
        cwd=PROJECT,
        env={**os.environ, "CC": "/nonexistent/cc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kernels will run interpreted" in done.stdout
    assert list(tmp_path.rglob("*.so")) == []
