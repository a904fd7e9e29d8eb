"""Identifiers and random numbers from one source that can be seeded.

Object names (ULID), checkpoint ids (UUID), write tokens and back-off jitter all come from an `Ids`. A seeded `Ids`
repeats its results, so that a simulated run can be repeated. An unseeded `Ids` asks the operating system each time, so
it has no state that a fork could duplicate.
"""

from __future__ import annotations

import random
import uuid
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.types import Ulid

_RANDOM_BITS: Final = 80
_MAX_MS: Final = 2**48 - 1
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUE_OF: Final = {letter: value for value, letter in enumerate(_ALPHABET)}
_SHIFTS: Final = tuple(range(125, -1, -5))
_PAIRS: Final = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_PAIR_SHIFTS: Final = tuple(range(120, -1, -10))


class Ids:
    """Creates identifiers and random numbers; may be called from many threads at once.

    Each method calls its generator once, in C code, which is atomic, so no lock is needed.
    A seeded `Ids` is for tests: after a fork, parent and child would create the same identifiers.
    A pickled copy has the same seed and repeats the results from the start.
    """

    def __init__(self, seed: int | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seed = seed
        self._clock = clock
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def __reduce__(self) -> tuple[object, tuple[int | None, Clock]]:
        return (_reopen, (self._seed, self._clock))

    def ulid(self, not_before_ms: int = 0) -> Ulid:
        """A new ULID with the time of the clock, or with `not_before_ms` if that is later."""
        ms = max(self._clock.now_ms(), not_before_ms)
        if not 0 <= ms <= _MAX_MS:
            raise InvalidRequest(f"{ms} ms does not fit the 48-bit time of a ULID; check the clock")
        return Ulid(ms << _RANDOM_BITS | self._random.getrandbits(_RANDOM_BITS))

    def uuid(self) -> uuid.UUID:
        """A new random (version 4) UUID."""
        return uuid.UUID(int=self._random.getrandbits(128), version=4)

    def token(self) -> str:
        """A unique string. A writer attaches it to a request to recognise its own write later."""
        return ulid_text(self.ulid())

    def uniform(self, low: float, high: float) -> float:
        """A number between `low` and `high`, each equally likely."""
        return low + (high - low) * self._random.random()

    def jitter(self, seconds: float, fraction: float) -> float:
        """`seconds`, longer or shorter by up to `fraction` of it, so that many waiting threads do not wake together."""
        if not 0 <= fraction <= 1:
            raise InvalidRequest(f"jitter fraction {fraction} is not between 0 and 1")
        return self.uniform(seconds * (1 - fraction), seconds * (1 + fraction))


def ulid_text(ulid: Ulid) -> str:
    """The 26 characters (Crockford base 32, upper case) of a ULID in paths; they sort like the ULIDs."""
    return "".join([_PAIRS[ulid >> shift & 1023] for shift in _PAIR_SHIFTS])


def parse_ulid(text: str) -> Ulid:
    """The ULID of a text that `ulid_text` returned.

    Lower case is refused: on an object store, a path in lower case is another object.
    """
    if len(text) != len(_SHIFTS):
        raise InvalidRequest(f"ULID {text!r} has {len(text)} characters; it must have {len(_SHIFTS)}")
    value = 0
    for position, letter in enumerate(text):
        digit = _VALUE_OF.get(letter)
        if digit is None:
            raise InvalidRequest(
                f"ULID {text!r} has {letter!r} at position {position}; "
                "only digits and upper-case letters other than I, L, O and U may appear"
            )
        value = value << 5 | digit
    if value >> 128:
        raise InvalidRequest(f"ULID {text!r} is larger than 128 bits; its first character must be 0 to 7")
    return Ulid(value)


def ulid_ms(ulid: Ulid) -> int:
    """The time of a ULID in milliseconds since the epoch."""
    return ulid >> _RANDOM_BITS


def _reopen(seed: int | None, clock: Clock) -> Ids:
    return Ids(seed, clock=clock)


SYSTEM_IDS: Final = Ids()
