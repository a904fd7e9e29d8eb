"""The operator's handle on a database: looks at it and maintains it without opening it for writing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from flagstone.maintenance.verification.report import Report
from flagstone.maintenance.verification.verifier import Verifier
from flagstone.store.paths import DbPaths
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store


class Admin:
    """Works on the database at `path`; nothing is contacted before the first call.

    Addresses are those of `flagstone.open`: a folder, `file://`, `memory://NAME/path`, `s3://bucket/path` and so
    on, or a path inside `store`. `wal_store` is where the log lives when it has a store of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: StoreLike | None = None,
        store_options: Mapping[str, OptionValue] | None = None,
        wal_store: StoreLike | None = None,
    ) -> None:
        self._store, root = resolve_database(path, store, store_options)
        self._paths = DbPaths(root)
        self._wal_store = resolve_wal_store(wal_store, self._store, store_options)

    def __repr__(self) -> str:
        return f"Admin({self._paths.root!r}, store={self._store.url!r})"

    def verify(self) -> Report:
        """Read every object, check every checksum, filter, order and reference, and report what is wrong.

        Reads only, and may run beside a writer.

        Raises:
            InvalidRequest: there is no database at that path.
            Unavailable: the store did not answer.

        """
        return Verifier(self._store, self._paths, wal_store=self._wal_store).verify()
