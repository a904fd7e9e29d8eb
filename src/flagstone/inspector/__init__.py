"""What a database looks like, read only: the numbers of `flagstone stats` and the page of `flagstone inspect`."""
