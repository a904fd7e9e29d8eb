"""The read path: from a key or a range to the rows that a read may see."""
