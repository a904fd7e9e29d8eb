"""The write path: from a call to a durable row."""
