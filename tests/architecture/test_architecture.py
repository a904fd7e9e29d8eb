"""House rules that no linter knows. The layers themselves are checked by import-linter (`make check`)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flagstone

SOURCE = Path(flagstone.__file__).parent
MODULES = sorted(path for path in SOURCE.rglob("*.py") if "_generated" not in path.parts)
KERNELS = sorted((SOURCE / "kernels").glob("_[a-z]*.py"))
SHARED = sorted((SOURCE / "kernels").glob("_[a-z]*.pxd"))
MAX_LINES = 500
MAX_KERNEL_LINES = 600
"""A kernel declares the C type of every name, which other modules need not."""
LONGER = {
    "db/writer/database.py": 520,
    "db/writer/transaction.py": 510,
    "write/writer_state.py": 850,
    "kernels/_block_writer.py": 640,
    "kernels/_memtable.py": 780,
    "kernels/_merge.py": 690,
}
"""`Db` and `Transaction` are public classes, with a docstring for each method. Every change under the write lock is a
method of one class, so that no other class takes the lock. A compiled class cannot be spread over files."""
BANNED_WORDS = ("util", "helper", "manager", "common", "misc")
HEAVY_PACKAGES = ("numpy", "obstore", "pyarrow", "pyspark")


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_the_package_has_modules_to_check() -> None:
    assert len(MODULES) > 10


def test_no_source_file_is_longer_than_the_limit() -> None:
    lengths = {module: len(module.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    limits = {
        module: LONGER.get(named(module), MAX_KERNEL_LINES if module.parent.name == "kernels" else MAX_LINES)
        for module in MODULES
    }

    lengths |= {shared: len(shared.read_text(encoding="utf-8").splitlines()) for shared in SHARED}
    limits |= dict.fromkeys(SHARED, MAX_KERNEL_LINES)

    long = {named(module): lines for module, lines in lengths.items() if lines >= limits[module]}
    assert not long, f"split by concept: {long}"


def test_no_module_name_contains_a_banned_word() -> None:
    found = [
        named(module)
        for module in MODULES
        if any(word in part for part in module.relative_to(SOURCE).parts for word in BANNED_WORDS)
    ]

    assert not found, f"name the concept instead of one of {BANNED_WORDS}: {found}"


def test_only_one_file_contains_the_names_of_slatedbs_metrics() -> None:
    found = [named(module) for module in MODULES if '"slatedb.' in module.read_text(encoding="utf-8")]

    assert found == ["runtime/metric_names.py"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_no_kernel_function_contains_a_literal_beyond_31_bits(kernel: Path) -> None:
    """Literals beyond 31 bits are Python objects to the compiler, and each use of one costs as much as a lookup.

    They stand in `cython.declare` at the top, or on a line that only the interpreted form runs.
    """
    tree = ast.parse(kernel.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    interpreted = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "not cython.compiled" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    large = {
        f"line {node.lineno}: {node.value:#x}"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >= 2**31
        if id(node) not in interpreted
    }

    assert not large


@pytest.mark.parametrize("shared", SHARED, ids=named)
def test_no_shared_c_function_contains_a_literal_beyond_31_bits_without_a_suffix(shared: Path) -> None:
    """`0xFFFFFFFFULL` is a C number; without the suffix it is a Python object, as in a kernel."""
    literals = re.findall(r"\b(0[xX][0-9a-fA-F_]+|\d[\d_]*)(?![\w.])", shared.read_text(encoding="utf-8"))

    assert [literal for literal in literals if int(literal.replace("_", ""), 0) >= 2**31] == []


@pytest.mark.parametrize("shared", SHARED, ids=named)
def test_both_forms_of_a_shared_file_define_the_same_names(shared: Path) -> None:
    """A `.pxd` file has what compiled kernels share, the `.py` file beside it what interpreted ones do."""
    text = shared.read_text(encoding="utf-8")
    functions = re.findall(r"^cdef inline [^(=]*?(\w+)\(", text, re.MULTILINE)
    structs = re.findall(r"^cdef struct (\w+):", text, re.MULTILINE)
    constants = re.findall(r'^    (?:const [\w ]+ )?([A-Z][A-Z0-9_]+)(?: = | ")', text, re.MULTILINE)
    tree = ast.parse(shared.with_suffix(".py").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }

    assert functions or structs
    assert {name for name in defined if not name.startswith("_")} == {*functions, *structs, *constants}


def test_importing_flagstone_imports_no_heavy_package() -> None:
    code = f"import sys, flagstone; print(*[name for name in {HEAVY_PACKAGES!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)

    assert run.stdout.split() == []


def test_importing_flagstone_starts_no_thread() -> None:
    code = "import threading, flagstone, flagstone.runtime.service; print(threading.active_count())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)

    assert run.stdout.split() == ["1"]
