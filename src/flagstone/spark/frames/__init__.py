"""Reads as Python functions: frames, lookups, aggregates, counts, reports and views."""
