"""The words of every collection plan: what was found, what becomes of it, and why.

A plan is made in two steps. The rules of a kind say which objects nobody can need any more; then age holds
back those that became so only recently, because somebody who read an older manifest may still be on its way
to them. The second step alone needs a clock, so a round that finds nothing unneeded asks for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

from flagstone.store.port import ObjectMeta

Kind = Literal[
    "checkpoint",
    "manifest",
    "compactions",
    "wal",
    "wal_fence",
    "compacted",
    "detach",
    "two_phase",
    "destroyed",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""Every kind of garbage, in the order of a round. SlateDB's names where SlateDB has the kind."""

TOO_YOUNG: Final = "younger than the minimum age"
_SECOND_MS: Final = 1000


class Verdict(NamedTuple):
    """What becomes of one object. `born_ms` is the latest moment it can have come into being."""

    meta: ObjectMeta
    id: int
    delete: bool
    reason: str
    born_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The verdicts on all objects of one kind, in the order they were listed."""

    kind: Kind
    verdicts: tuple[Verdict, ...] = ()

    @property
    def deletions(self) -> Sequence[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.delete]

    @property
    def youngest_due_ms(self) -> int | None:
        """The birth of the oldest object that only its age keeps."""
        return min(
            (verdict.born_ms for verdict in self.verdicts if verdict.reason == TOO_YOUNG), default=None
        )


def keep(meta: ObjectMeta, object_id: int, reason: str) -> Verdict:
    """Somebody may need the object."""
    return Verdict(meta, object_id, False, reason, _latest_birth_ms(meta))


def drop(meta: ObjectMeta, object_id: int, reason: str, *, stamped_ms: int = 0) -> Verdict:
    """Nobody needs the object. `stamped_ms` is a time in its name, which may be later than the store's."""
    return Verdict(meta, object_id, True, reason, max(stamped_ms, _latest_birth_ms(meta)))


def apply_age(plan: Plan, *, now_ms: int, min_age_ms: int) -> Plan:
    """The plan without deletions of objects younger than `min_age_ms` (above 0) at `now_ms` of the store's clock."""
    horizon_ms = now_ms - min_age_ms
    return replace(
        plan,
        verdicts=tuple(
            verdict._replace(delete=False, reason=TOO_YOUNG)
            if verdict.delete and verdict.born_ms > horizon_ms
            else verdict
            for verdict in plan.verdicts
        ),
    )


def _latest_birth_ms(meta: ObjectMeta) -> int:
    # A whole second is most likely one that the store cut off: the object may be that much younger.
    modified_ms = meta.last_modified_ms
    return modified_ms + _SECOND_MS - 1 if modified_ms % _SECOND_MS == 0 else modified_ms
