"""Pins: what keeps the log for a consumer of changes until it has read it.

An ordinary checkpoint keeps the files its own readers replay, and no later ones; so no real checkpoint can keep files
that are yet to be written. A log pin therefore is a checkpoint whose name begins with `LOG_PIN_PREFIX` and which
names manifest 0, an object that belongs to no history (the first manifest is 1) and that nobody takes for the latest.
It is ours alone and says one thing: of the log, all files behind its `replay_after_wal_id` are needed, without an end.
Every collector that follows SlateDB's rules, SlateDB's own included, then keeps what a consumer has not read, however
long the consumer is away and whoever writes meanwhile. It refers to no table, so a slow consumer costs nothing but log
(and the tables of bulk loads it has yet to pass: `load_marks`).

The position of a consumer stands in the name of its checkpoint, and changes with the manifest, atomically. Manifest
0 follows: it keeps the log from the smallest position on, and never less than the latest manifest does, so that
a new pin at the end of the log needs no help from it. Three rules make that safe against crashes and races:

- manifest 0 exists before a checkpoint names it, and is made again should a collector have removed it in between;
- a position is moved in the manifest first and in manifest 0 afterwards: a crash in between keeps too much;
- manifest 0 is replaced by compare-and-swap, read before the positions and never written twice with the same bytes;
  a new pin replaces it once more after it stands in the manifest, and whoever had not seen that pin loses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, unquote
from uuid import UUID

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest, Unavailable
from flagstone.metadata.integrity import seal_metadata
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.manifest_codec import encode_manifest, load_manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectStore, ObjectVersion
from flagstone.types import ManifestId, WalId
from flagstone.wal.changes import Position
from flagstone.wal.load_marks import Waiting, settle_marks

LOG_PIN_PREFIX: Final = "flagstone.log-pin/"
PIN_MANIFEST_ID: Final = ManifestId(0)
"""The one manifest that is replaced in place: never take it from a cache."""

_NO_END: Final = WalId(2**62)
"""Beyond every log. Not the greatest number there is: SlateDB's collector adds one to it."""

_LONGEST: Final = timedelta(days=10_000)
"""The end of a checkpoint's life is stored as a 32-bit second, which lasts until 2106."""

_ATTEMPTS: Final = 100
_PAUSE_S: Final = 0.02


class HeldPin(NamedTuple):
    """A pin as the manifest has it."""

    checkpoint: Checkpoint
    name: str
    position: Position


def pins_log(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint keeps the log from its manifest on."""
    return checkpoint.name is not None and checkpoint.name.startswith(LOG_PIN_PREFIX)


def encode_pin(name: str, position: Position) -> str:
    """The name of the checkpoint of a consumer at that position."""
    return (
        f"{LOG_PIN_PREFIX}{quote(name, safe='')}"
        f"?next={position.next_id}&after={position.after_seq}&copied={int(position.copied)}"
        f"{f'&loaded={position.loaded}' if position.loaded else ''}"
    )


def decode_pin(checkpoint: Checkpoint) -> HeldPin | None:
    """The pin that a checkpoint is, or None when it is none of ours."""
    if not pins_log(checkpoint) or checkpoint.manifest_id != PIN_MANIFEST_ID:
        return None
    name, _, stated = (checkpoint.name or "").removeprefix(LOG_PIN_PREFIX).partition("?")
    said = parse_qs(stated)
    try:
        position = Position(
            WalId(int(said["next"][0])),
            int(said["after"][0]),
            int(said.get("loaded", ["0"])[0]),
            copied=bool(int(said["copied"][0])),
        )
    except (KeyError, ValueError):
        return None
    return HeldPin(checkpoint, unquote(name), position)


def held_pins(manifest: Manifest) -> list[HeldPin]:
    """Every pin of a database."""
    return [pin for checkpoint in manifest.checkpoints if (pin := decode_pin(checkpoint)) is not None]


def find_pin(manifest: Manifest, name: str) -> HeldPin | None:
    """The pin of that name."""
    return next((pin for pin in held_pins(manifest) if pin.name == name), None)


def settle_loads(manifest: Manifest, *, now_s: int) -> Manifest:
    """The manifest that keeps the bulk loads which its pins have yet to pass; see `load_marks`."""
    pins = [Waiting(pin.position, pin.checkpoint.expires_s) for pin in held_pins(manifest)]
    return settle_marks(manifest, pins, now_s=now_s)


def plan_log_start(manifest: Manifest) -> WalId | None:
    """Behind which file manifest 0 must keep the log; None without a pin.

    Never beyond where the latest manifest keeps it: a consumer that comes now begins there.
    """
    positions = [pin.position.next_id - 1 for pin in held_pins(manifest)]
    return WalId(min(*positions, manifest.replay_after_wal_id)) if positions else None


Decide = Callable[[Versioned[Manifest], Position | None], tuple[Manifest, Position]]
"""From the latest manifest and the position found there: what to write beside the pin, and the new position."""


class LogPin:
    """The pin of one consumer. One consumer at a time; two under one name move each other's position.

    `lifetime` is how long it outlives its consumer; None: until it is released. It is refreshed at half of that.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        store: ObjectStore,
        name: str,
        *,
        lifetime: timedelta | str | None,
        clock: Clock,
        ids: Ids,
    ) -> None:
        if not name:
            raise InvalidRequest("a pin needs a name, by which its consumer finds it again")
        lifetime = None if lifetime is None else as_duration(lifetime, "lifetime")
        if lifetime is not None and not timedelta(seconds=1) <= lifetime <= _LONGEST:
            raise InvalidRequest(
                f"a pin lives from one second to {_LONGEST.days} days, not {lifetime}; None means until released"
            )
        self.name: Final = name
        self._manifests = manifests
        self._store = store
        self._path = manifests.paths.manifest(PIN_MANIFEST_ID)
        self._lifetime_s = None if lifetime is None else int(lifetime.total_seconds())
        self._clock = clock
        self._ids = ids
        self._expires_s: int | None = None

    def find(self) -> Position | None:
        """Where the consumer of that name stopped; None when it never began, or its pin is gone."""
        held = find_pin(self._manifests.require_latest().value, self.name)
        return None if held is None else held.position

    def place(self, decide: Decide) -> tuple[Position, Versioned[Manifest]]:
        """Set the pin, found again or new; returns its position and the manifest that has it.

        A crash before the manifest is written leaves nothing but manifest 0, which keeps nothing unless it is named;
        after it, a pin that may keep too much, which the next `place` or `move` corrects.
        """
        self._ensure()
        checkpoint_id = self._ids.uuid()

        def edit(now: Versioned[Manifest]) -> Manifest:
            held = find_pin(now.value, self.name)
            edited, position = decide(now, None if held is None else held.position)
            return self._with(edited, checkpoint_id if held is None else held.checkpoint.id, position, held)

        written = self._manifests.update(edit)
        held = find_pin(written.value, self.name)
        assert held is not None, "the edit put it there"
        self._expires_s = held.checkpoint.expires_s
        self._settle(lazily=False)
        return held.position, written

    def move(self, position: Position) -> None:
        """The consumer needs nothing before `position` any more. Also lets the pin live anew.

        Raises:
            InvalidRequest: the pin is gone: it expired, or was released.

        """

        def edit(now: Versioned[Manifest]) -> Manifest:
            held = find_pin(now.value, self.name)
            if held is None:
                raise InvalidRequest(
                    f"the pin {self.name!r} is gone: it expired or was released, and parts of the log may be, too; "
                    "begin again, with a longer lifetime"
                )
            return self._with(now.value, held.checkpoint.id, position, held)

        held = find_pin(self._manifests.update(edit).value, self.name)
        assert held is not None, "the edit put it there"
        self._expires_s = held.checkpoint.expires_s
        self._settle(lazily=True)

    def due(self) -> bool:
        """Whether half of its life is over."""
        if self._lifetime_s is None or self._expires_s is None:
            return False
        return self._clock.now_ms() / 1000 >= self._expires_s - self._lifetime_s / 2

    def release(self) -> None:
        """Keep nothing for this consumer any more. Releasing twice is fine."""

        def edit(now: Versioned[Manifest]) -> Manifest:
            held = find_pin(now.value, self.name)
            if held is None:
                return now.value
            return settle_loads(remove_checkpoint(now.value, held.checkpoint.id), now_s=self._now_s())

        self._manifests.update(edit)
        self._settle(lazily=True)

    def _with(
        self, manifest: Manifest, checkpoint_id: UUID, position: Position, held: HeldPin | None
    ) -> Manifest:
        now_s = self._now_s()
        expires_s = None if self._lifetime_s is None else now_s + self._lifetime_s
        pinned = Checkpoint(
            checkpoint_id,
            PIN_MANIFEST_ID,
            now_s if held is None else held.checkpoint.created_s,
            expires_s,
            encode_pin(self.name, position),
        )
        return settle_loads(add_checkpoint(manifest, pinned), now_s=now_s)

    def _now_s(self) -> int:
        return self._clock.now_ms() // 1000

    def _ensure(self) -> None:
        """Make manifest 0 before a checkpoint names it: a collector that found only the name would have to stop."""
        if self._read() is not None:
            return
        latest = self._manifests.require_latest().value
        start = plan_log_start(latest)
        with suppress(ObjectExists):
            self._write(latest.replay_after_wal_id if start is None else start, None)

    def _settle(self, *, lazily: bool) -> None:
        """Bring manifest 0 in line with the positions; `lazily` writes nothing when it is."""
        for _ in range(_ATTEMPTS):
            stored = self._read()
            # Read after manifest 0: of a pin that came in between, its owner replaces manifest 0 under us.
            start = plan_log_start(self._manifests.require_latest().value)
            unchanged = stored is not None and stored[0].replay_after_wal_id == start
            if start is None or (lazily and unchanged):
                return
            try:
                self._write(start, stored)
            except (ObjectExists, ObjectChanged):
                self._clock.sleep(self._ids.uniform(0, _PAUSE_S))
                continue
            return
        raise Unavailable(f"lost every race for {self._path}; try again")

    def _read(self) -> tuple[Manifest, ObjectVersion] | None:
        try:
            stored = self._store.get(self._path)
        except ObjectMissing:
            return None
        return load_manifest(stored.data, self._path), stored.meta.version

    def _write(self, start: WalId, stored: tuple[Manifest, ObjectVersion] | None) -> None:
        # The epoch is chance: no two versions have the same bytes, so none has the same entity tag. Not initialized:
        # nobody shall take it for something to read.
        data = encode_manifest(
            Manifest(
                initialized=False,
                writer_epoch=self._ids.uuid().int >> 66,
                replay_after_wal_id=start,
                wal_id_last_seen=_NO_END,
            )
        )
        if stored is None:
            self._store.put_if_absent(self._path, seal_metadata(data, self._path))
        else:
            self._store.put_if_match(self._path, seal_metadata(data, self._path), stored[1])
