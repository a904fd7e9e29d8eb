"""Verification: reads every object of a database and reports its defects. Writes nothing."""
