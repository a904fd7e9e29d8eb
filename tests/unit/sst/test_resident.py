"""What type checkers are told of a table's compiled part is what it has."""

from __future__ import annotations

import ast
from pathlib import Path

from flagstone.kernels import probe
from flagstone.sst import resident

SOURCE = Path(resident.__file__).parents[1]


def methods_of_resident(file: Path) -> dict[str, list[str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Resident")
    return {
        method.name: [argument.arg for argument in method.args.args]
        for method in found.body
        if isinstance(method, ast.FunctionDef)
    }


def test_at_run_time_it_is_the_kernels_class() -> None:
    assert resident.Resident is probe.Resident


def test_checkers_see_the_methods_and_parameters_of_the_kernel() -> None:
    told = methods_of_resident(SOURCE / "sst/resident.py")

    assert told == methods_of_resident(SOURCE / "kernels/_probe.py")
