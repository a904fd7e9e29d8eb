"""Lets PySpark find the data source "flagstone" by itself: it looks for packages whose name begins with `pyspark_`."""

from flagstone.spark.datasource import FlagstoneDataSource as DefaultSource

__all__ = ["DefaultSource"]
