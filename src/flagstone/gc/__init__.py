"""Garbage collection: decides which objects no process can need any more (pure), then deletes them."""
