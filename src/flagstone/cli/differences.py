"""`flagstone diff`: what changed from one checkpoint to another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.cli.binary import KeyForm, ValueForm, parse_bytes, show_key, show_value
from flagstone.cli.context import AsJson, invocation
from flagstone.cli.output import print_json_line
from flagstone.cli.parsing import parse_merge_operator, require_checkpoint_id
from flagstone.cli.rows import MergeWith

if TYPE_CHECKING:
    from flagstone.types import Row


def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="UUID", help="The checkpoint to start from.")],
    after: Annotated[str, typer.Argument(metavar="UUID", help="The checkpoint to compare it with.")],
    prefix: Annotated[str | None, typer.Option(help="Only keys that begin with this.")] = None,
    key: Annotated[
        KeyForm,
        typer.Option(help="How keys are given and shown; auto is text, or hexadecimal with a leading 0x."),
    ] = KeyForm.auto,
    value: Annotated[
        ValueForm, typer.Option(help="How values are shown; none leaves them out.")
    ] = ValueForm.auto,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Print the keys whose rows differ between two checkpoints, in key order.

    A line begins with + for a key that was added, - for one that was removed, ~ for one that changed, followed by the
    new value (by the old one for -). With --json every line has key, before and after. Tables that both have in
    common are read only where they must.

    For example:

        flagstone -p ./shop diff 01740ee5-6459-44af-9a45-85deb6e468e3 912803c8-7a32-4920-8a42-5abb398157ac
        flagstone -p ./shop --json diff 01740ee5-… 912803c8-… --prefix user/ | jq .key
    """
    call = invocation(context, json=json)
    first, second = require_checkpoint_id(before), require_checkpoint_id(after)
    wanted = None if prefix is None else parse_bytes(prefix, key, what="prefix")
    operator = parse_merge_operator(merge_operator)
    found = call.connect().admin().diff(first, second, prefix=wanted, merge_operator=operator)

    def shown(row: Row | None) -> Any:
        return None if row is None else show_value(row.value, value, for_json=call.json)

    for change in found:
        name = show_key(change.key, key, for_json=call.json)
        old, new = shown(change.before), shown(change.after)
        if call.json:
            print_json_line({"key": name, "before": old, "after": new})
            continue
        sign = "+" if change.before is None else "-" if change.after is None else "~"
        text = old if change.after is None else new
        sys.stdout.write(f"{sign} {name}\n" if text is None else f"{sign} {name}\t{text}\n")


COMMANDS: Final[tuple[Callable[..., None], ...]] = (diff,)
