"""Locks, events and conditions, in one place so that a simulator can replace them.

Production code never imports `threading` for these: it takes the names from here.
"""

from __future__ import annotations

from threading import Condition, Event, Lock, RLock

__all__ = ["Condition", "Event", "Lock", "RLock"]
