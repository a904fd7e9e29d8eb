"""The database as a table of other engines: a PyArrow dataset (which DuckDB reads) and a Polars scan."""
