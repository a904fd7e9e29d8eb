"""Typed collections: a prefix of the database whose keys and values are Python objects. `docs/collections.md`."""
