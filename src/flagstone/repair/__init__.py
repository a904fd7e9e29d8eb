"""Repair: finds the defects of a database, and repairs them at a stated price, so that it opens and is consistent."""
