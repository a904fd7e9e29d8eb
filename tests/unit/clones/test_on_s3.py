"""Clones on a real object store, from their creation to their destruction."""

from __future__ import annotations

import pickle

import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.store.resolve import resolve
from kit.databases import QUIET
from servers.s3 import S3Server


@pytest.mark.slow
def test_clones_projections_unions_and_restores_work_on_s3(seaweedfs: S3Server) -> None:
    # Other tests share the bucket, so the store is a folder of it.
    store = resolve(f"{seaweedfs.url}/views", **seaweedfs.options(), pickle_secrets=True)  # type: ignore[arg-type]

    def admin(path: str) -> Admin:
        return pickle.loads(pickle.dumps(Admin(path, store=store)))  # type: ignore[no-any-return]

    rows = {b"k%02d" % number: b"v" for number in range(10)}
    with flagstone.open("p", store=store, settings=QUIET) as db:
        for key, value in rows.items():
            db.put(key, value)
        db.flush()
        saved = db.checkpoint(name="then")
        db.put(b"k00", b"later")

    admin("p").clone("c", checkpoint=saved.id)
    admin("p").clone("a", range=(None, b"k05"))
    admin("p").clone("b", range=(b"k05", None))
    admin("a").union(f"{seaweedfs.url}/views/u", ["b"])
    admin("p").restore(saved.id)

    later = rows | {b"k00": b"later"}
    for path, expected in (("p", rows), ("c", rows), ("u", later)):
        with flagstone.open(path, store=store, settings=QUIET, create=False) as db:
            assert dict(db.scan()) == expected
    with pytest.raises(InvalidRequest, match="live checkpoints"):
        admin("p").destroy()
    for path in ("u", "c"):
        admin(path).destroy()
    admin("a").destroy(soft=True)
    holding = {meta.path.partition("/")[0] for meta in store.list("") if "/compacted/" in meta.path}
    assert holding <= {"p", "a", "b"}
