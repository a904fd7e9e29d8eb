"""The classes for asyncio: the same engine and the same methods, awaited."""
