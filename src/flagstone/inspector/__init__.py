"""The state of a database, read-only: the figures of `flagstone stats` and the page of `flagstone inspect`."""
