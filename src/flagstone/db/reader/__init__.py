"""`DbReader`, former states and change feeds: reading a database that another process may be writing."""
