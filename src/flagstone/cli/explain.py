"""`explain`: how a get finds its answer, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_facts, print_json, print_line, print_table
from flagstone.cli.parsing import key_form, parse_as_of, parse_bytes, parse_merge_operator
from flagstone.cli.rows import AsOf, Base64, Checkpoint, Hex, Key, MergeWith, row_json
from flagstone.inspector.text import line_text, size_text

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.metadata.manifest import Manifest
    from flagstone.read.explanation import Explanation, Step


def explain(
    context: typer.Context,
    key: Key,
    as_hex: Hex = False,
    as_base64: Base64 = False,
    checkpoint: Checkpoint = None,
    as_of: AsOf = None,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Show how a get finds its answer: which memtables, SSTs, filters and blocks it asks, and what that costs.

    Reads as a reader does that has just opened the database: nothing is in memory yet but the rows of the WAL. Dollars
    are those of the requests at list prices of Amazon S3 Standard. Writes nothing and may run beside a writer.

    For example:

        flagstone -p s3://bucket/shop explain user/42
        flagstone -p s3://bucket/shop --json explain --hex 0x0001ff | jq .requests
    """
    call = invocation(context, json=json)
    wanted = parse_bytes(key, key_form(hex_given=as_hex, base64_given=as_base64))
    operator, moment = parse_merge_operator(merge_operator), parse_as_of(as_of)
    connection = call.connect()
    with connection.reader(checkpoint=checkpoint, as_of=moment, merge_operator=operator) as reader:
        opening = Spent.by(connection)
        found = reader.explain(wanted)
        print_explanation(call, found, reader.manifest(), opening)


class Spent:
    """Requests and bytes, and what the requests cost."""

    def __init__(self, requests: dict[str, int], size: int) -> None:
        self.requests = requests
        self.size = size

    @classmethod
    def by(cls, connection: Connection) -> Spent:
        """What the command has used so far."""
        counted: dict[str, int] = {}
        for counter in connection.counters:
            for kind, count in counter.by_kind().items():
                counted[kind] = counted.get(kind, 0) + count
        return cls(counted, connection.bytes_moved)

    @property
    def dollars(self) -> float:
        """What these requests cost."""
        from flagstone.store.prices import S3_STANDARD

        return S3_STANDARD.requests(self.requests)

    def to_dict(self) -> dict[str, Any]:
        return {"requests": sum(self.requests.values()), "bytes": self.size, "dollars": self.dollars}

    def __str__(self) -> str:
        count = sum(self.requests.values())
        return f"{count} {'request' if count == 1 else 'requests'}, {size_text(self.size)}"


def print_explanation(
    call: Invocation,
    found: Explanation,
    manifest: Manifest,
    opening: Spent | None = None,
    *,
    write: Callable[[Any], None] = print_json,
) -> None:
    """Print an explanation; `opening` is what opening the database has used. `write` prints JSON."""
    reading = Spent({"get": found.requests}, found.bytes)
    levels = level_names(manifest)
    if call.json:
        document = found.to_dict()
        for step in document["steps"]:
            step["level"] = levels.get(step["name"])
        document["row"] = None if found.row is None else row_json(found.row)
        document["dollars"] = reading.dollars
        document["opening"] = None if opening is None else opening.to_dict()
        write(document)
        return
    print_line(f"{line_text(found.key)}: {_answer(found)}")
    print_line("")
    print_table(
        ("source", "filter", "block", "fetched", "answer"),
        [_row(step, levels) for step in found.steps],
        empty="no memtable and no SST can have the key",
    )
    print_line("")
    per_million = f"${reading.dollars * 1_000_000:,.2f} per million"
    print_facts(
        [
            ("this read", f"{reading} in {found.rounds} {'round' if found.rounds == 1 else 'rounds'}"),
            ("cost", f"{per_million}; a read from memory costs nothing"),
            ("opening", None if opening is None else f"{opening}, ${opening.dollars:.6f}"),
        ]
    )


def level_names(manifest: Manifest) -> dict[str, str]:
    """The level of each SST by its id: L0 or the id of its sorted run."""
    from flagstone.runtime.ids import ulid_text

    levels = {ulid_text(view.sst_id): "L0" for tree in manifest.trees for view in tree.l0}
    for tree in manifest.trees:
        for run in tree.runs:
            levels |= {ulid_text(view.sst_id): f"run {run.id}" for view in run.views}
    return levels


def _answer(found: Explanation) -> str:
    if found.row is not None:
        return f"a value of {size_text(len(found.row.value))}, sequence number {found.row.seq:,}"
    by = found.answered_by
    if by is None:
        return "no source has it"
    return (
        f"no value: the newest row is a {by.outcome}"
        if "tombstone" in by.outcome
        else "no value: it has expired"
    )


def _row(step: Step, levels: dict[str, str]) -> tuple[str, ...]:
    name = (
        f"memtable {step.name}"
        if step.source == "memtable"
        else f"{levels.get(step.name, 'SST')} {step.name}"
    )
    asked = {True: "allows it", False: "excludes it", None: ""}[step.filter]
    block = "" if step.block is None else str(step.block)
    return name, asked, block, size_text(step.fetched_bytes) if step.fetched_bytes else "", step.outcome
