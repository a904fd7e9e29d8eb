"""The write-ahead log: numbered files, each the whole of what one flush made durable."""
