"""Change data: committed changes in commit order, read from WAL files and from bulk loads."""
