"""Large databases: what their metadata costs, with up to 100,000 SSTs and 1,000 checkpoints.

The database is its metadata: the SSTs that the manifest lists do not exist, because none of these steps may read one.
Every step is measured in one process; store requests go to memory, except those of `open`.
"""

from __future__ import annotations
