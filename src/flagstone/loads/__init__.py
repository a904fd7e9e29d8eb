"""Bulk loads: SSTs built outside the writer, added to the database by one manifest version."""
