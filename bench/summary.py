"""`python -m bench summary`: makes `results/README.md`, its charts and the table of the project's README from stored results.

It reads `NAME.json` only, so the texts and charts show what was measured. Results of different days or machines may be
mixed: each section names its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.charts import bar_chart, line_chart, ratio_chart
from bench.front_page import PAGE, front_page
from bench.harness import (
    FLAGSTONE,
    PARQUET,
    PEERS,
    RESULTS,
    ROCKS,
    WHEEL,
    Measurement,
    compared,
    markdown_table,
    results_folder,
)

COLOURS: Final = (FLAGSTONE, WHEEL, ROCKS, PARQUET)
ORDER: Final = (
    "engine", "remote", "compaction", "amplification", "stalls", "requests", "spark", "spark-reads", "spark-lookup", "spark-compaction",
    "kernels", "latency", "threads", "scaling", "metadata",
)  # fmt: skip
"""The order of the sections; others come after them."""
HEADLINE: Final = ("engine", "compaction", "spark")
"""The results whose ratios share the first chart; the others have charts in their own sections."""


def write_summary() -> Path:
    """Write `README.md` and the charts into the folder of the results; returns its path."""
    folder = results_folder()
    results = load_results(folder)
    for stale in folder.glob("*.svg"):
        stale.unlink()
    charts = draw(results)
    for name, chart in charts.items():
        (folder / name).write_text(chart)
    page = folder / "README.md"
    page.write_text(page_text(results, charts))
    if folder == RESULTS:
        PAGE.write_text(front_page(PAGE.read_text(), results))
    return page


def load_results(folder: Path) -> list[dict[str, Any]]:
    """All stored results, in the order of the sections."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    known = {name: place for place, name in enumerate(ORDER)}
    return sorted(found, key=lambda result: (known.get(result["name"], len(known)), result["name"]))


def draw(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """File name -> chart."""
    charts = {}
    groups = {"ratios.svg": [result for result in results if result["name"] in HEADLINE]}
    groups |= {
        f"{result['name']}-ratios.svg": [result] for result in results if result["name"] not in HEADLINE
    }
    for name, group in groups.items():
        rows = {
            one.what: ratios
            for result in group
            for one in measurements(result)
            if (ratios := {PEERS[peer]: ratio for peer in PEERS if (ratio := one.ratio(peer)) is not None})
        }
        if rows:
            title = "Flagstone against its peers" if len(group) > 1 else group[0]["title"]
            subtitle = "Logarithmic; right of 1× Flagstone is better, left of it the other is"
            charts[name] = ratio_chart(title, subtitle, rows, [FLAGSTONE, *PEERS.values()])
    for result in results:
        for curve in result["curves"]:
            better = f"{curve['better']} is better"
            charts[f"{result['name']}-{curve['name']}.svg"] = line_chart(
                curve["title"],
                f"{result['date']}, {better}",
                curve["points"],
                COLOURS,
                x_name="rows",
                y_name=curve["unit"],
            )
        for bars in result["bars"]:
            subtitle = f"{result['date']}, logarithmic"
            charts[f"{result['name']}-{bars['name']}.svg"] = bar_chart(
                bars["title"], subtitle, bars["rows"], bars["unit"]
            )
    return charts


def measurements(result: Mapping[str, Any]) -> list[Measurement]:
    """What a result contributes to the comparison."""
    return [Measurement(**one) for one in result["measurements"]]


def page_text(results: Sequence[Mapping[str, Any]], charts: Collection[str]) -> str:
    """The page, with those charts."""
    lines = ["# Measured", ""]
    if any(result["quick"] for result in results):
        lines += ["**From a smoke run at tiny sizes: these numbers mean nothing.**", ""]
    lines += [
        f"Made by `make bench` ({sum(result['seconds'] for result in results) / 60:.0f} minutes): every contender in turn, medians;",
        "ratios above 1× are in Flagstone's favour. The wheel is the official `slatedb` 0.17 as Python calls it, so most of its",
        "time on single rows is its binding, not its engine.",
        "",
        *_machines(results),
        "",
        *(["![Ratios](ratios.svg)", ""] if "ratios.svg" in charts else []),
        *_comparison(results),
    ]
    for result in results:
        lines += ["", *_section(result, charts)]
    return "\n".join(lines).rstrip() + "\n"


def _machines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The machines and days of the results, usually one of each."""
    by_machine: dict[str, list[str]] = {}
    for result in results:
        by_machine.setdefault(_machine_text(result), []).append(result["name"])
    if len(by_machine) == 1:
        return [next(iter(by_machine))]
    return [f"- {', '.join(names)}: {machine}" for machine, names in by_machine.items()]


def _machine_text(result: Mapping[str, Any]) -> str:
    facts = result["machine"]
    busy = facts["busy_before_percent"]
    parts = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']:.0f} GB",
        f"{facts['system']}, Python {facts['python']}, kernels {facts['kernels']}",
        ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        "file systems: " + ", ".join(f"{kind} ({name})" for name, kind in facts["file_systems"].items()),
    ]
    if busy is not None:
        parts.append(f"processors {busy:.0f} % busy before the run")
    return f"{result['date']}. " + "; ".join(parts) + "."


def _comparison(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table of all that was measured for several engines."""
    everything = [(result, one) for result in results for one in measurements(result)]
    if not everything:
        return []
    peers = [peer for peer in PEERS if any(peer in one.values for _, one in everything)]
    header, rows = compared([one for _, one in everything], peers)
    linked = [
        [f"[{row[0]}]({result['name']}.md)", *row[1:]]
        for (result, _), row in zip(everything, rows, strict=True)
    ]
    return markdown_table(header, linked)


def _section(result: Mapping[str, Any], charts: Collection[str]) -> list[str]:
    """A result with its charts, and with its table unless that is in the comparison or drawn."""
    name = result["name"]
    source = f"[{name}.md]({name}.md), {result['date']}, took {result['seconds']} s. {result['basis']}"
    lines = [f"## {result['title']}", "", source, ""]
    if f"{name}-ratios.svg" in charts:
        lines += [f"![Ratios]({name}-ratios.svg)", ""]
    for bars in result["bars"]:
        lines += [f"![{bars['title']}]({name}-{bars['name']}.svg)", ""]
    for curve in result["curves"]:
        lines += [f"![{curve['title']}]({name}-{curve['name']}.svg)", ""]
        lines += [f"**{curve['title']}.** {curve['limit']}", ""]
    if not result["curves"] and not result["measurements"]:
        lines += [*markdown_table(result["header"], result["rows"]), ""]
    if not result["curves"]:
        lines += result["remarks"]
    return lines
