"""Repair: a database that does not open, or refers to what is gone, made sound again at a stated price."""
