"""A Spark session that just works, and the two parts of it for those who make their own."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from flagstone.errors import InvalidRequest
from flagstone.spark.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"

_DEFAULTS: Final = {
    PUSHDOWN: "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOOPBACK: Final = "127.0.0.1"
_LOCAL_DEFAULTS: Final = {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}


def session(**conf: Any) -> SparkSession:
    """A session with Flagstone registered: the running one, or a new one with all cores of this machine.

    Arguments are settings with underscores for dots, or whole names: `session(master="local[4]",
    **{"spark.driver.memory": "4g"})`. `spark_driver_memory="4g"` is the same; `app_name` and `master` are short names.

    Raises:
        InvalidRequest: PySpark is not installed, or there is no Java of version 17 or newer.

    """
    builder = _builder()
    for name, value in conf.items():
        builder = builder.config(_setting(name), _text(value))
    spark: SparkSession = configure(builder).getOrCreate()
    register(spark)
    return spark


def configure(builder: Any) -> Any:
    """A session builder (`SparkSession.builder`) with what Flagstone needs; what was set before stays.

    Sets JAVA_HOME and PYSPARK_PYTHON of this process where they are not set: Spark would otherwise run its workers
    with whatever `python3` is on the path. A master given by the environment or by spark-submit is left alone.
    """
    home = find_java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    held: dict[str, Any] = dict(getattr(builder, "_options", {}))
    for name, value in _DEFAULTS.items():
        if name not in held:
            builder = builder.config(name, value)
    master = held.get("spark.master", os.environ.get("MASTER"))
    if master is None and "spark.remote" not in held and "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master("local[*]")
        master = "local[*]"
    if master is not None and str(master).startswith("local"):
        # Without a network name, or with one that leads elsewhere, a local session would not find itself.
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        for name, value in _LOCAL_DEFAULTS.items():
            if name not in held:
                builder = builder.config(name, value)
    return builder


def register(spark: SparkSession) -> None:
    """Make `format("flagstone")` known to a session, and let it push key filters down. Twice is fine."""
    from flagstone.spark.datasource import FlagstoneDataSource  # noqa: PLC0415 - needs PySpark

    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(FlagstoneDataSource)


def _builder() -> Any:
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - optional
    except ImportError as missing:
        raise InvalidRequest(
            f"PySpark is not installed here ({missing}); install it with `pip install 'flagstone[spark]'`"
        ) from missing
    return SparkSession.builder


def _setting(name: str) -> str:
    if name == "app_name":
        return "spark.app.name"
    if name == "master":
        return "spark.master"
    return name if "." in name else name.replace("_", ".")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
