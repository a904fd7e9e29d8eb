"""Reading bytes that a checksum judges: a wrong answer is asked for once more, past every cache.

A cache that kept a bad answer of the network, or a disk that changed it since, would give the same bytes for ever. So
every reader of an SST decodes its bytes through here: when they turn out damaged, what is cached of the object is
dropped and the store itself is asked once. Damage of the stored object shows again and is raised; nothing of it stays
in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from flagstone.errors import CorruptData
from flagstone.store.caching import CachingStore
from flagstone.store.port import ObjectStore

_log = logging.getLogger("flagstone.store")

T = TypeVar("T")


def read_checked(store: ObjectStore, path: str, start: int, stop: int, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of bytes [start, stop) of the object; asked twice at most.

    `decode` must raise `CorruptData` for bytes that are not what they should be, and change nothing then.
    """
    try:
        return decode(store.get_range(path, start, stop))
    except CorruptData as error:
        _log.warning("damaged bytes were read, asking once more: path=%s error=%s", path, error)
    _forget(store, path)
    try:
        return decode(store.get_range(path, start, stop))
    except CorruptData:
        _forget(store, path)
        raise


def _forget(store: ObjectStore, path: str) -> None:
    if isinstance(store, CachingStore):
        store.forget(path)
