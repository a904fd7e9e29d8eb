"""Sequence numbers and time: `seq-to-ts` and `ts-to-seq`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC
from enum import StrEnum
from typing import Annotated, Final

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.exit_codes import ABSENT
from flagstone.cli.output import print_json, say
from flagstone.cli.parsing import parse_moment


class Rounding(StrEnum):
    """Which of the two neighbours is meant when there is no exact answer."""

    up = "up"
    down = "down"


Round = Annotated[
    Rounding,
    typer.Option(
        case_sensitive=False, help="Take the last known point before it (down), or the first from it on (up)."
    ),
]


def seq_to_ts(
    context: typer.Context,
    seq: Annotated[int, typer.Argument(min=0, help="The sequence number.")],
    round: Round = Rounding.down,  # noqa: A002 - SlateDB's name
    json: AsJson = False,
) -> None:
    """Tell when a sequence number was current; exit with 1 when that is not known.

    The manifest remembers one point a minute at most, and fewer of the distant past.

    For example:

        flagstone -p s3://bucket/shop seq-to-ts 1234567
        flagstone -p s3://bucket/shop seq-to-ts 1234567 --round up
    """
    call = invocation(context, json=json)
    found = call.connect().admin().time_of(seq, rounding=round.value)
    if found is None:
        _unknown(call, "ts", f"nothing is known about when the sequence number {seq} was current")
        return
    text = found.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if call.json:
        print_json({"seq": seq, "ts": text, "ts_secs": int(found.timestamp())})
    else:
        say(text)


def ts_to_seq(
    context: typer.Context,
    ts: Annotated[
        str, typer.Argument(help="Seconds since the epoch, or a time such as 2026-11-16T03:00:00Z.")
    ],
    round: Round = Rounding.down,  # noqa: A002 - SlateDB's name
    json: AsJson = False,
) -> None:
    """Tell which sequence number was current at a time; exit with 1 when that is not known.

    The manifest remembers one point a minute at most, and fewer of the distant past.

    For example:

        flagstone -p s3://bucket/shop ts-to-seq 1794798585
        flagstone -p s3://bucket/shop ts-to-seq 2026-11-16T03:00:00Z --round up
    """
    call = invocation(context, json=json)
    moment = parse_moment(ts)
    found = call.connect().admin().sequence_at(moment, rounding=round.value)
    if found is None:
        _unknown(call, "seq", f"nothing is known about which sequence number was current at {ts}")
    elif call.json:
        print_json({"ts": moment.isoformat().replace("+00:00", "Z"), "seq": found})
    else:
        say(str(found))


def _unknown(call: Invocation, field: str, problem: str) -> None:
    if call.json:
        print_json({field: None})
    sys.stderr.write(f"flagstone: {problem}\n")
    raise typer.Exit(ABSENT)


COMMANDS: Final[tuple[Callable[..., None], ...]] = (seq_to_ts, ts_to_seq)
