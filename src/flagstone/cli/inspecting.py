"""`flagstone inspect`: the database as a page in a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.output import print_json, say
from flagstone.cli.signals import service


def inspect(
    context: typer.Context,
    port: Annotated[
        int, typer.Option(help="The port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    refresh: Annotated[int, typer.Option(help="Seconds between two looks of an open page.", min=1)] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page to this file instead, and end.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show tables, runs, compactions, checkpoints and sizes as a page, for browsers of this machine.

    Reads what `stats` reads, for every request; values never. Ends with Ctrl-C.

    For example:

        flagstone -p s3://bucket/shop inspect
        flagstone -p s3://bucket/shop inspect --output shop.html
    """
    from flagstone.inspector.looking import look
    from flagstone.inspector.page import render
    from flagstone.inspector.server import serve

    call = invocation(context, json=json)
    connection = call.connect()

    def page(refresh_s: int | None) -> str:
        seen = look(connection.store, connection.wal_store, connection.root, jobs=True)
        return render(seen, refresh_s=refresh_s)

    def tell(**facts: str) -> None:
        if call.json:
            print_json(facts)
        else:
            say("; ".join(f"{name} {value}" for name, value in facts.items()))

    made = page(None if output else refresh)  # what is wrong is told before anybody waits
    if output is not None:
        output.write_text(made, encoding="utf-8")
        tell(written=str(output))
        return
    with service("inspector") as stop:
        serve(lambda: page(refresh), port=port, stop=stop, ready=lambda address: tell(open=address))


COMMANDS: Final[tuple[Callable[..., None], ...]] = (inspect,)
