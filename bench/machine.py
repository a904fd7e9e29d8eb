"""The machine of a measurement: processor, memory, versions, file systems, and its load."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

MEMORY_FOLDER: Final = Path("/dev/shm")
BUSY_VARIABLE: Final = "FLAGSTONE_BENCH_BUSY"
"""Set by the runner: the load of the machine before it began."""

PACKAGES: Final = ("flagstone", "slatedb", "rocksdict", "pyarrow", "pyspark", "obstore")


def machine_facts() -> dict[str, Any]:
    """Everything a reader needs to judge a number, as plain values."""
    return {
        "processor": _processor(),
        "cores": _cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "kernels": _kernels(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "file_systems": {
            name: file_system(folder)
            for name, folder in (("temporary", Path(tempfile.gettempdir())), ("in memory", MEMORY_FOLDER))
            if folder.is_dir()
        },
        "busy_before_percent": float(os.environ[BUSY_VARIABLE]) if BUSY_VARIABLE in os.environ else None,
    }


def machine() -> str:
    """The same in half a line."""
    return machine_line(machine_facts())


def machine_line(facts: Mapping[str, Any]) -> str:
    """Facts, also stored ones, in half a line."""
    busy = facts["busy_before_percent"]
    others = "" if busy is None else f", {busy:.0f} % busy before"
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']:.0f} GB, Python {facts['python']}, "
        f"{facts['system']}{others}"
    )


def busy_percent(seconds: float = 1.0) -> float | None:
    """The present load of all processors in percent; None if the system does not report it."""
    if not Path("/proc/stat").exists():
        return None

    def ticks() -> tuple[int, int]:
        spent = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(spent), spent[3] + spent[4]

    whole, idle = ticks()
    time.sleep(seconds)
    whole_after, idle_after = ticks()
    return 100 * (1 - (idle_after - idle) / max(whole_after - whole, 1))


def scratch_place(needed_bytes: int) -> str | None:
    """The folder for temporary databases: in memory if they fit there with room to spare, else the usual one.

    This keeps the speed of the disk out of the measurement.
    """
    if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > 2 * needed_bytes:
        return str(MEMORY_FOLDER)
    return None


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, as mounted."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    best, kind = "", "unknown"
    for line in mounts.read_text().splitlines():
        _, point, found, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    for line in described.read_text().splitlines() if described.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _cores() -> int:
    """The processors that this process may use; in a container these are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kernels() -> str:
    from flagstone.kernels import load_compiled

    return "interpreted" if load_compiled("block_reader") is None else "compiled"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
