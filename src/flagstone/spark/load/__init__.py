"""Bulk load: executors build SSTs, the driver commits them with one manifest."""
