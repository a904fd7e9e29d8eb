"""The write-ahead log (WAL): numbered files, each with the rows that one flush made durable."""
