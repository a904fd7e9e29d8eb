"""Where tests make an operation fail, or let another process act: at a store call, or before a bytecode of Flagstone.

Store calls: `make test` fails every fourth call of an operation, beginning at another one in each run; `make faults`
fails all of them.

Bytecodes: Ctrl-C and `MemoryError` come between two bytecodes. A tracer counts the bytecodes of an operation and raises
before a given one, so that a test can try all of them. It leaves out two places where the interpreter raises nothing of
its own and no code could survive an exception: the end of a `with` block, between the block and the call of `__exit__`,
and the first and last steps of an exception's handler.
"""

from __future__ import annotations

import dis
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self, TypeVar

import flagstone
from flagstone.store.port import ObjectStore
from flagstone.testing.faults import Fault, FaultyStore

T = TypeVar("T")
SOURCE = str(Path(flagstone.__file__).parent)
STRIDE = int(os.environ.get("SWEEP_STRIDE", "4"))


def struck_calls(calls: int, *, stride: int = 1) -> range:
    """Which of the first `calls` store calls fail, counted from 1; a `stride` makes them rarer by that factor."""
    step = STRIDE * stride
    return range(1 + random.randrange(min(step, calls)), calls + 1, step)


class InterposingStore(FaultyStore):
    """Lets another process act once: right before the `nth` call that matches `op` and `path`, or right after it."""

    def __init__(
        self,
        inner: ObjectStore,
        act: Callable[[], object],
        *,
        op: str = "*",
        path: str = "*",
        nth: int = 1,
        after: bool = False,
    ) -> None:
        super().__init__(inner)
        self.acted = False
        self._act = act
        self._where = Fault("slow", op=op, path=path)
        self._left = nth
        self._after = after

    def _call(self, op: str, path: str, request: Callable[[], T]) -> T:
        self._left -= self._where.matches(op, path)
        due = self._left == 0 and not self.acted
        self.acted |= due  # first, because `act` may come through this store
        if due and not self._after:
            self._act()
        answer = super()._call(op, path, request)
        if due and self._after:
            self._act()
        return answer


class Struck(BaseException):
    """Raised by the tracer. Like `KeyboardInterrupt` it is no `Exception`, so that error handlers do not catch it."""


class Tracer:
    """Counts the bytecodes of Flagstone's own code that this thread runs, and raises before number `at`."""

    def __init__(self, at: int | None, error: type[BaseException] = Struck) -> None:
        self.at = at
        self.steps = 0
        self.where = ""
        self._error = error

    def __enter__(self) -> Self:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE) or frame.f_code.co_name == "__del__":
            return None  # the interpreter swallows what a `__del__` raises
        frame.f_trace_opcodes = True
        passed_over = _passed_over(frame.f_code)

        def step(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "opcode" and frame.f_lasti not in passed_over:
                self._strike(frame)
            return step

        return step

    def _strike(self, frame: FrameType) -> None:
        self.steps += 1
        if self.steps - 1 == self.at:
            sys.settrace(None)
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            raise self._error


_known: dict[CodeType, frozenset[int]] = {}


def _passed_over(code: CodeType) -> frozenset[int]:
    """The offsets where a handler begins, or where a `with` block ends.

    The latter are those of `None, None, None`, the call that takes them, and what moves a returned value away.
    """
    if code not in _known:
        steps = list(dis.get_instructions(code))
        # What has no line of its own is the interpreter's tidying up behind a handler.
        found = {
            step.offset
            for step in steps
            if step.opname == "PUSH_EXC_INFO" or step.positions is None or step.positions.lineno is None
        }
        for at in range(len(steps) - 3):
            if steps[at].opname == "POP_EXCEPT":
                found |= {step.offset for step in steps[at : at + 3]}
            if all(step.opname == "LOAD_CONST" and step.argval is None for step in steps[at : at + 3]):
                call = next((n for n in range(at + 3, at + 5) if steps[n].opname == "CALL"), at + 2)
                first = at - (steps[at - 1].opname in ("SWAP", "NOP"))
                found |= {step.offset for step in steps[first : call + 1]}
        _known[code] = frozenset(found)
    return _known[code]
