"""The notice `flagstone/writer`: which writer has the database open, and that it is alive while a load needs it.

A writer writes the notice when it opens the database and again when it closes it. While a bulk load is under way it
writes it again at intervals, with another number, and once more before it adopts a load. So a driver finds out within
seconds that a writer has crashed: the notice stays the same. The notice is a hint. The epoch in the manifest decides.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore

_NOTICE: Final = "writer"
_MISSED_BEATS: Final = 3
_SPARE_S: Final = 5.0
_ADOPTING_S: Final = 60.0
"""More than the flushes and the manifest of an adoption may take."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The writer of `epoch` is open; None: that of `closed` has closed. An open one writes a new `beat` every `beat_s`
    seconds.
    """

    epoch: int | None
    closed: int | None = None
    beat: int = 0
    beat_s: float | None = None
    adopting: bool = False

    @property
    def silence_s(self) -> float | None:
        """After how many seconds without another notice the writer counts as crashed; None if it does not renew it."""
        if self.beat_s is None:
            return None
        return max(_MISSED_BEATS * self.beat_s + _SPARE_S, _ADOPTING_S if self.adopting else 0.0)


def save_notice(store: ObjectStore, paths: DbPaths, notice: Notice) -> None:
    """Replace the notice."""
    store.put(paths.own(_NOTICE), json.dumps(asdict(notice)).encode())


def load_notice(store: ObjectStore, paths: DbPaths) -> Notice:
    """The notice; that of a closed writer if there is none, or if it cannot be decoded."""
    try:
        fields = json.loads(store.get(paths.own(_NOTICE)).data)
        epoch, closed, beat_s = fields["epoch"], fields.get("closed"), fields.get("beat_s")
        return Notice(
            None if epoch is None else int(epoch),
            None if closed is None else int(closed),
            int(fields.get("beat", 0)),
            None if beat_s is None else float(beat_s),
            adopting=bool(fields.get("adopting", False)),
        )
    except (ObjectMissing, AttributeError, KeyError, TypeError, ValueError):
        return Notice(None)
