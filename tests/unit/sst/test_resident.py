"""The declared type of `Resident` agrees with the kernel."""

from __future__ import annotations

import ast
from pathlib import Path

from flagstone.kernels import probe
from flagstone.sst import reader

SOURCE = Path(reader.__file__).parents[1]


def methods_of_resident(file: Path) -> dict[str, list[str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Resident")
    return {
        method.name: [argument.arg for argument in method.args.args]
        for method in found.body
        if isinstance(method, ast.FunctionDef)
    }


def test_at_run_time_resident_is_the_class_of_the_kernel() -> None:
    assert reader.Resident is probe.Resident


def test_the_declared_methods_and_parameters_are_those_of_the_kernel() -> None:
    declared = methods_of_resident(SOURCE / "sst/reader.py")

    assert declared == methods_of_resident(SOURCE / "kernels/_probe.py")
