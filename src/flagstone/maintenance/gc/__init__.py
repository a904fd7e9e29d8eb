"""Garbage collection: decides what nobody can need any more (pure), then deletes it."""
