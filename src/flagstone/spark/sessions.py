"""A Spark session that just works, and the two parts of it for those who make their own."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

from flagstone.errors import InvalidRequest
from flagstone.spark.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
REDACTION: Final = "spark.sql.redaction.options.regex"

_REDACTED: Final = "(?i)url"
"""What Spark hides of options in plans and logs, besides those that sound like secrets."""

_STORE_REDACTED: Final = "(?i)url|^store[.]"
"""And all that is about a store: `account_key` or `sas_key` do not sound like a secret to Spark."""

_DEFAULTS: Final = {
    PUSHDOWN: "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOOPBACK: Final = "127.0.0.1"
_LOCAL_DEFAULTS: Final = {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
_LOCAL_CONNECT_DEFAULTS: Final = {**_LOCAL_DEFAULTS, "spark.connect.grpc.binding.address": _LOOPBACK}
_SHORT: Final = {"app_name": "spark.app.name", "master": "spark.master", "remote": "spark.remote"}


def session(**conf: Any) -> SparkSession:
    """A session with Flagstone registered: the running one, or a new one with all cores of this machine.

    Arguments are settings with underscores for dots, or whole names: `session(master="local[4]",
    **{"spark.driver.memory": "4g"})`. `spark_driver_memory="4g"` is the same; `app_name`, `master` and `remote` (Spark
    Connect: `sc://host`, or `local[2]` for a server in this process) are short names.

    Raises:
        InvalidRequest: PySpark or what Spark Connect needs is not installed, there is no Java of version 17 or newer,
            or an argument is no setting.

    """
    builder = _builder()
    for name, value in conf.items():
        builder = builder.config(_setting(name), _text(value))
    try:
        with warnings.catch_warnings():
            # A local Spark Connect server has taken its settings when it started; its client tries them once more.
            warnings.filterwarnings("ignore", message="Failed to set spark", category=UserWarning)
            spark: SparkSession = configure(builder).getOrCreate()
    except ImportError as missing:
        raise InvalidRequest(
            f"Spark Connect needs more than PySpark ({missing}); install it with `pip install 'pyspark[connect]'`"
        ) from missing
    register(spark)
    return spark


def configure(builder: Any) -> Any:
    """A session builder (`SparkSession.builder`) with what Flagstone needs; what was set before stays.

    Sets JAVA_HOME and PYSPARK_PYTHON of this process where they are not set: Spark would otherwise run its workers
    with whatever `python3` is on the path. A master given by the environment or by spark-submit is left alone. A client
    of a Spark Connect server elsewhere needs no Java: there only push-down is switched on.
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
        # Without a network name, or with one that leads elsewhere, a local session would not find itself.
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        for name, value in (_LOCAL_DEFAULTS if remote is None else _LOCAL_CONNECT_DEFAULTS).items():
            if name not in held:
                builder = builder.config(name, value)
    return builder


def register(spark: SparkSession) -> None:
    """Make `format("flagstone")` known to a session, let it hand filters over, and hide stores' options in its plans.

    Whether a read takes the filters, its option `pushdown` says. Twice is fine. Call it once in every thread of your
    own that reads or writes databases through DataFrames.
    """
    from flagstone.spark.datasource import FlagstoneDataSource  # noqa: PLC0415 - needs PySpark

    spark.conf.set(PUSHDOWN, "true")
    if spark.conf.get(REDACTION, _REDACTED) == _REDACTED:
        spark.conf.set(REDACTION, _STORE_REDACTED)
    spark.dataSource.register(FlagstoneDataSource)
    jvm = getattr(spark, "_jvm", None)  # Spark Connect has none
    if jvm is not None:
        # Spark looks for sources in the session that is active in the calling thread, and a new thread has none.
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)  # noqa: SLF001


def _builder() -> Any:
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - optional
    except ImportError as missing:
        raise InvalidRequest(
            f"PySpark is not installed here ({missing}); install it with `pip install 'flagstone[spark]'`"
        ) from missing
    return SparkSession.builder


def _setting(name: str) -> str:
    whole = _SHORT.get(name) or (name if "." in name else name.replace("_", "."))
    if not whole.startswith("spark."):
        # Spark itself ignores such a setting with a warning.
        raise InvalidRequest(
            f"{name!r} is no setting of Spark; they begin with `spark`, as in spark_driver_memory. Short names are "
            f"{', '.join(_SHORT)}"
        )
    return whole


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
