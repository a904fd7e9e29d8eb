"""The database open for writing: the engine, its background services, and the blocking class `Db`."""
