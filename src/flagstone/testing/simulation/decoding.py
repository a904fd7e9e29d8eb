"""Manifests and compactions files are decoded once per world, and not once per process that reads them.

The values are immutable, so processes can share them. Damaged bytes are other bytes, and raise each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final
from unittest.mock import patch

from flagstone.metadata import stores
from flagstone.metadata.compactions import load_compactions
from flagstone.metadata.manifest_codec import load_manifest
from flagstone.verification import verifier

_REMEMBERED: Final = 512


@contextmanager
def remembered_decoding() -> Iterator[None]:
    """Remember what stored bytes decode to."""
    manifests = lru_cache(_REMEMBERED)(load_manifest)
    with (
        patch.object(stores, "load_manifest", manifests),
        patch.object(verifier, "load_manifest", manifests),
        patch.object(stores, "load_compactions", lru_cache(_REMEMBERED)(load_compactions)),
    ):
        yield
