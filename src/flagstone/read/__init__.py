"""The read path: from a key or a range to the rows a reader may see."""
