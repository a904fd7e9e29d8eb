"""Charts as SVG text: ratios as bars around 1×, curves on two logarithmic axes. Readable on light and dark pages.

Pure: figures in, text out. Colours and markers belong to the engines, so that a reader learns them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 760
STYLE: Final = """
text { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 } .quiet { fill: #59636e; font-size: 12px }
.card { fill: #ffffff; stroke: #d1d9e0 } .grid { stroke: #d1d9e0; stroke-width: 1 } .one { stroke: #59636e; stroke-width: 1.5 }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
.c0 { fill: #0969da } .c1 { fill: #bc4c00 } .c2 { fill: #1a7f37 } .c3 { fill: #8250df }
.s0 { stroke: #0969da } .s1 { stroke: #bc4c00 } .s2 { stroke: #1a7f37 } .s3 { stroke: #8250df }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .quiet { fill: #9198a1 }
.card { fill: #0d1117; stroke: #3d444d } .grid { stroke: #2f353d } .one { stroke: #9198a1 }
.c0 { fill: #4493f8 } .c1 { fill: #f0883e } .c2 { fill: #3fb950 } .c3 { fill: #ab7df8 }
.s0 { stroke: #4493f8 } .s1 { stroke: #f0883e } .s2 { stroke: #3fb950 } .s3 { stroke: #ab7df8 }
}
""".strip()


def ratio_chart(
    title: str, subtitle: str, rows: Mapping[str, Mapping[str, float]], colours: Sequence[str]
) -> str:
    """Horizontal bars that begin at 1× on a logarithmic axis: to the right is better, to the left worse.

    `rows` is label -> series -> ratio; `colours` lists the series in the order of their colours.
    """
    found = [ratio for row in rows.values() for ratio in row.values()]
    low, high = _decades(min([*found, 1.0]), max([*found, 1.0]))
    left, right, top, bar = _label_width(rows), WIDTH - 70, 92, 15
    place = _log_scale(low, high, left, right)
    body, y = [], float(top)
    for label, row in rows.items():
        middle = y + bar * len(row) / 2 + 4
        body.append(_text(left - 12, middle, label, anchor="end"))
        for series, ratio in row.items():
            begin, end = sorted((place(1.0), place(ratio)))
            colour = colours.index(series) % 4
            body.append(
                f'<rect class="c{colour}" x="{begin:.1f}" y="{y + 1:.1f}" width="{max(end - begin, 1):.1f}" '
                f'height="{bar - 3}" rx="2"/>'
            )
            # Beside the long end of the bar; a bar to the left ends where the labels begin.
            body.append(_text(max(end, place(1.0)) + 5, y + bar - 3, f"{_short(ratio)}×", css="quiet"))
            y += bar
        y += 11
    ticks = [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    axis = [_vertical(place(tick), top - 6, y, "one" if tick == 1 else "grid") for tick in ticks]
    axis += [_text(place(tick), y + 16, f"{_short(tick)}×", css="quiet", anchor="middle") for tick in ticks]
    used = [series for series in colours if any(series in row for row in rows.values())]
    legend = _legend([(f"× {series}", colours.index(series)) for series in used], 66)
    return _document(title, subtitle, y + 32, [*axis, *body, *legend])


def bar_chart(title: str, subtitle: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Horizontal bars of figures on a logarithmic axis: label -> series -> figure."""
    found = [figure for row in rows.values() for figure in row.values() if figure > 0]
    low, high = _decades(min(found) / 1.01, max(found))
    left, right, top, bar = _label_width(rows), WIDTH - 110, 92, 17
    place = _log_scale(low, high, left, right)
    names = list(dict.fromkeys(series for row in rows.values() for series in row))
    body, y = [], float(top)
    for label, row in rows.items():
        body.append(_text(left - 12, y + bar * len(row) / 2 + 4, label, anchor="end"))
        for series, figure in row.items():
            end = place(max(figure, low))
            body.append(
                f'<rect class="c{names.index(series) % 4}" x="{left}" y="{y + 1:.1f}" '
                f'width="{max(end - left, 1):.1f}" height="{bar - 3}" rx="2"/>'
            )
            amount = f"${_short(figure)}" if unit == "$" else f"{_short(figure)} {unit}"
            body.append(_text(end + 5, y + bar - 4, amount, css="quiet"))
            y += bar
        y += 11
    ticks = _ticks(low, high)
    axis = [_vertical(place(tick), top - 6, y, "grid") for tick in ticks]
    axis += [_text(place(tick), y + 16, _short(tick), css="quiet", anchor="middle") for tick in ticks]
    legend = _legend([(name, number) for number, name in enumerate(names)], 66)
    return _document(title, subtitle, y + 32, [*axis, *body, *legend])


def line_chart(
    title: str,
    subtitle: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    colours: Sequence[str],
    *,
    x_name: str,
    y_name: str,
) -> str:
    """Curves with logarithmic axes; a series is its points in any order."""
    points = [point for line in series.values() for point in line]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    if math.log10(x_low) == math.log10(x_high):
        x_low, x_high = x_low / 2, x_high * 2
    y_low, y_high = _wide(min(y for _, y in points), max(y for _, y in points))
    left, right, top, bottom = 92, WIDTH - 40, 108, 380
    across, up = _log_scale(x_low, x_high, left + 20, right - 20), _log_scale(y_low, y_high, bottom, top)
    body = []
    for tick in _ticks(y_low, y_high):
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        body.append(_text(left - 8, up(tick) + 4, _short(tick), css="quiet", anchor="end"))
    decades = _ticks(x_low, x_high, fine=False)
    for tick in decades if len(decades) > 1 else sorted({x for x, _ in points}):
        body.append(_vertical(across(tick), top, bottom, "grid"))
        body.append(_text(across(tick), bottom + 18, _power(tick), css="quiet", anchor="middle"))
    body.append(_text((left + right) / 2, bottom + 38, x_name, css="quiet", anchor="middle"))
    body.append(_text(left, top - 10, y_name, css="quiet"))
    for name, line in series.items():
        colour = colours.index(name) % 4
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(line))
        body.append(f'<polyline class="line s{colour}" points="{path}"/>')
        body += [_marker(across(x), up(y), colour) for x, y in line]
    legend = _legend([(name, colours.index(name)) for name in series], 66)
    return _document(title, subtitle, bottom + 54, [*body, *legend])


def _document(title: str, subtitle: str, height: float, body: Sequence[str]) -> str:
    tall, name = round(height), escape(title, {'"': "&quot;"})
    size = f'viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">',
            f"<style>{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{tall - 1}" rx="8"/>',
            _text(20, 28, title, css="title"),
            _text(20, 47, subtitle, css="quiet"),
            *body,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, content: str, *, css: str = "", anchor: str = "start") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _vertical(x: float, top: float, bottom: float, css: str) -> str:
    return f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _legend(names: Sequence[tuple[str, int]], y: float) -> list[str]:
    parts, x = [], 20.0
    for name, colour in names:
        parts += [_marker(x + 6, y, colour % 4), _text(x + 17, y + 4.5, name)]
        x += 34 + 7.4 * len(name)
    return parts


def _label_width(labels: Iterable[str]) -> int:
    """Width of the longest label in a typical typeface."""
    return 32 + round(7.4 * max(map(len, labels)))


def _marker(x: float, y: float, colour: int) -> str:
    """A shape for each colour, for readers who cannot distinguish the colours."""
    if colour == 0:
        return f'<circle class="c0" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    if colour == 1:
        return f'<rect class="c1" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    reach = 5.5
    corners = [(0, -reach), (reach, reach * 0.8), (-reach, reach * 0.8)]
    if colour == 3:
        corners = [(0, -reach), (reach, 0), (0, reach), (-reach, 0)]
    shape = " ".join(f"{x + right:.1f},{y + down:.1f}" for right, down in corners)
    return f'<polygon class="c{colour}" points="{shape}"/>'


def _log_scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Map a figure to a position between two ends, by its logarithm."""
    first, span = math.log10(low), math.log10(high) - math.log10(low)
    return lambda figure: begin + (math.log10(figure) - first) / span * (end - begin)


def _decades(low: float, high: float) -> tuple[float, float]:
    """Powers of ten around both; at least one decade."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return 10.0**first, 10.0 ** max(last, first + 1)


def _wide(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis with margins around the figures and at least a third of a decade between them."""
    low, high = low / 1.25, high * 1.25
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2.2, middle * 2.2
    return low, high


def _ticks(low: float, high: float, *, fine: bool = True) -> list[float]:
    """Powers of ten, and 2 and 5 times them if there is room."""
    steps = (1, 2, 5) if fine and high / low < 150 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001]


def _short(figure: float) -> str:
    """Three digits, thousands and millions as k and M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if figure >= limit * 0.9995:
            return f"{figure / limit:.3g}{letter}"
    return f"{figure:.2g}" if figure < 1 else f"{figure:.3g}"


def _power(figure: float) -> str:
    """A power of ten in full, other numbers shortened."""
    power = round(math.log10(figure))
    if not math.isclose(figure, 10.0**power, rel_tol=1e-6):
        return _short(figure)
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
