"""`Admin`: inspect and maintain a database without opening it for writing."""
