"""Reads every object of a database and says what is wrong with it. Writes nothing, changes nothing."""
