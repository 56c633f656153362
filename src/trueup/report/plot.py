"""One small SVG chart: axes, lines, bands, points, bars, limits, and its numbers as a table, which is also what is said
when a value is pointed at.

Colours are classes `s0`, `s1`, ... of the style sheet, so that a chart follows the page into dark mode; every series has
a dash pattern and a marker of its own as well, for eyes and printers that do not tell the colours apart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from trueup.report.scale import Scale

WIDTH, HEIGHT = 380, 236
_RIGHT, _TOP, _BOTTOM = 12, 26, 42
_MARKERS = ("circle", "square", "triangle", "diamond")


class Plot:
    def __init__(self, title: str, x: Scale, y: Scale, x_label: str, y_label: str):
        self.title, self.x, self.y, self.x_label, self.y_label = title, x, y, x_label, y_label
        # Room for the longest tick: 1.00005 takes more than 1.
        self._edge = max(36, 14 + round(6.7 * max((len(text) for _, text in y.ticks()), default=0)))
        self._parts: list[str] = []
        self._legend: list[str] = []
        self._points: list[tuple[float, dict[str, str]]] = []

    def left(self, value: float) -> float:
        return round(self._edge + self.x.at(value) * (WIDTH - self._edge - _RIGHT), 1)

    def top(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - self.y.at(value) * (HEIGHT - _TOP - _BOTTOM), 1)

    def line(self, series: int, xs: Sequence, ys: Sequence, name: str = "", markers: bool = False) -> None:
        """A value that is None or NaN breaks the line, unless it has markers: those values are rare by nature."""
        points = [(self.left(x), self.top(y)) if _drawable(self.y, y) else None for x, y in zip(xs, ys)]
        known = [point for point in points if point]
        if not known:
            return
        pen = ""
        for point in known if markers else points:
            pen += ("M" if not pen or pen[-1] == " " else "L") + f"{point[0]:g},{point[1]:g}" if point else " "
        # A move without a line draws nothing: values between two gaps get a point.
        self._parts.append(f'<path class="line s{series}" d="{pen.strip()}"/>')
        if markers or len(known) == 1:
            self._parts += [marker(series, *point) for point in known]
        if name:
            self.legend(series, name, markers)

    def band(self, series: int, xs: Sequence, lows: Sequence, highs: Sequence) -> None:
        rows = [row for row in zip(xs, lows, highs) if all(_finite(value) for value in row)]
        if len(rows) > 1:
            there = [f"{self.left(x)},{self.top(low)}" for x, low, _ in rows]
            back = [f"{self.left(x)},{self.top(high)}" for x, _, high in reversed(rows)]
            self._parts.append(f'<path class="band s{series}" d="M{"L".join(there + back)}Z"/>')

    def intervals(self, series: int, xs: Sequence, means: Sequence, halves: Sequence) -> None:
        """Means with error bars; a mean whose interval is not known is hollow."""
        for x, mean, half in zip(xs, means, halves):
            if not _drawable(self.y, mean):
                continue
            at = self.left(x)
            if _finite(half):
                ends = f"{self.top(mean - half)}V{self.top(mean + half)}"
                self._parts.append(f'<path class="error s{series}" d="M{at},{ends}"/>')
            self._parts.append(marker(series, at, self.top(mean), hollow=not _finite(half)))

    def bars(self, series: int, edges: Sequence[float], heights: Sequence[float]) -> None:
        floor = HEIGHT - _BOTTOM
        path = []
        for low, high, height in zip(edges, edges[1:], heights):
            if height > 0:
                path.append(f"M{self.left(low)},{floor}V{self.top(height)}H{self.left(high)}V{floor}Z")
        self._parts.append(f'<path class="bar s{series}" d="{"".join(path)}"/>')

    def upright(self, value: float, label: str = "", kind: str = "limit", row: int = 0) -> None:
        """A vertical line with its name beside the top, on the side where there is room."""
        at, width = self.left(value), 7.4 * len(label)
        self._parts.append(f'<path class="{kind}" d="M{at},{_TOP}V{HEIGHT - _BOTTOM}"/>')
        if label and at + 4 + width < WIDTH:
            self._note(at + 4, _TOP + 10 + 13 * row, label, "start")
        elif label:
            self._note(at - 4, _TOP + 10 + 13 * row, label, "end")

    def level(self, value: float, label: str, kind: str = "ideal") -> None:
        at = self.top(value)
        self._parts.append(f'<path class="{kind}" d="M{self._edge},{at}H{WIDTH - _RIGHT}"/>')
        self._note(WIDTH - _RIGHT + 3, at + 4, label, "start", kind)

    def _note(self, x: float, y: float, text: str, anchor: str, kind: str = "limit") -> None:
        text = html.escape(text)
        self._parts.append(f'<text class="note {kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>')

    def legend(self, series: int, name: str, marked: bool = False) -> None:
        sign = f'<path class="line s{series}" d="M0,6H26"/>' + (marker(series, 13, 6) if marked else "")
        self._legend.append(
            f'<span><svg class="key" viewBox="0 0 26 12" aria-hidden="true">{sign}</svg>{html.escape(name)}</span>'
        )

    def point(self, x: float, **cells: str) -> None:
        """A row of the table behind the chart, shown when the chart is pointed at near `x`; names are column heads."""
        self._points.append((self.left(x), cells))

    def figure(self, caption: str = "") -> str:
        legend = f'<div class="legend">{"".join(self._legend)}</div>' if self._legend else ""
        caption = f"<p>{html.escape(caption)}</p>" if caption else ""
        title = html.escape(self.title)
        reached = " ".join(f"{x:g}" for x, _ in self._points)
        label = f"Chart: {title}. {html.escape(self.y_label)} against {html.escape(self.x_label)}"
        keys = ". Arrow keys step through the values; the table below holds them all" if self._points else ""
        return (
            f"<figure><figcaption><h3>{title}</h3>{legend}</figcaption>"
            f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{label}{keys}" '
            f'data-x="{reached}">{self._axes()}{"".join(self._parts)}</svg>{caption}'
            f"{numbers_table([cells for _, cells in self._points])}</figure>"
        )

    def _axes(self) -> str:
        floor, parts = HEIGHT - _BOTTOM, []
        for value, text in self.y.ticks():
            at = self.top(value)
            parts.append(f'<path class="grid" d="M{self._edge},{at}H{WIDTH - _RIGHT}"/>')
            parts.append(f'<text x="{self._edge - 6}" y="{at + 4:g}" text-anchor="end">{text}</text>')
        for value, text in self.x.ticks():
            at = self.left(value)
            parts.append(f'<path class="tick" d="M{at},{floor}v4"/>')
            parts.append(f'<text x="{at}" y="{floor + 16}" text-anchor="middle">{text}</text>')
        parts.append(f'<path class="axis" d="M{self._edge},{floor}H{WIDTH - _RIGHT}"/>')
        centre = (self._edge + WIDTH - _RIGHT) / 2
        x_label, y_label = html.escape(self.x_label), html.escape(self.y_label)
        parts.append(f'<text class="unit" x="{centre:g}" y="{HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
        parts.append(
            f'<text class="unit" x="4" y="13">{y_label}</text>'
        )  # above its axis: nobody likes to tilt the head
        return "".join(parts)


def numbers_table(rows: list[dict[str, str]]) -> str:
    """What a chart shows, as a table that is folded away; a value that a row lacks is empty."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    lines = []
    for row in rows:
        first, *others = (html.escape(row.get(name, "")) for name in names)
        lines.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>")
    return (
        f'<details class="values"><summary>Numbers</summary><div class="wide" tabindex="0"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def marker(series: int, x: float, y: float, hollow: bool = False) -> str:
    css = f"marker s{series}" + (" hollow" if hollow else "")
    shape = _MARKERS[series % len(_MARKERS)]
    if shape == "circle":
        return f'<circle class="{css}" cx="{x:g}" cy="{y:g}" r="3.2"/>'
    if shape == "square":
        return f'<rect class="{css}" x="{x - 3:g}" y="{y - 3:g}" width="6" height="6"/>'
    if shape == "diamond":
        return f'<path class="{css}" d="M{x:g},{y - 4:g}l4,4l-4,4l-4,-4z"/>'
    return f'<path class="{css}" d="M{x - 4:g},{y + 3:g}h8l-4,-7z"/>'


def _finite(value) -> bool:
    return value is not None and math.isfinite(value)


def _drawable(scale: Scale, value) -> bool:
    return _finite(value) and (scale.kind != "log" or value > 0)
