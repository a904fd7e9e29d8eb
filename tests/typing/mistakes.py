"""Mistakes that type checkers must find: each line that ends with the word below has one."""

from __future__ import annotations

import flagstone
from flagstone import Settings

Settings(flush_interval=5)  # mistake
Settings(flush_intervall="5s")  # mistake
db = flagstone.open("memory://typing/db")
text: str = db[b"a"]  # mistake
db["a"] = b"1"  # mistake
surely: bytes = db.get(b"a")  # mistake
sequence = db.status().durable_sequence  # mistake
db.run(lambda tx: 1, isolation="chaos")  # mistake
orders = db.collection("orders", key=(str, int), value=str)
orders["eu"] = "x"  # mistake
orders["eu", 1] = 5  # mistake
