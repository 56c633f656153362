"""A study's figures: one small chart an arm, a strip of sparklines a metric, an outcome against a measured metric.

Twelve arms are too many for colours. Each gets a chart of its own, on axes that all share, with the reference arm dashed.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from trueup.report.plot import Plot, marker
from trueup.report.scale import Scale, spanning
from trueup.study import words
from trueup.study.results import CURVES, OUTCOMES

SEED, REFERENCE = 8, 9  # style classes s8 and s9: faint lines for single seeds, dashed grey for the reference arm
LOG = {"mismatch/kl_k3", "mismatch/prob_diff_mean"}
_WIDE, _HIGH, _PAD = 132, 40, 3  # a sparkline

CSS = """
:root{--c3:#a3457f;--c4:#7a6200;--c5:#4b5563}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--c3:#e08fc0;--c4:#d8c24a;--c5:#c3cad3}}
:root[data-theme=dark]{--c3:#e08fc0;--c4:#d8c24a;--c5:#c3cad3}
.s3{--s:var(--c3)}.s4{--s:var(--c4)}.s5{--s:var(--c5)}.s8{--s:var(--c0)}.s9{--s:var(--faint)}
.line.s3{stroke-dasharray:10 3 2 3}.line.s4{stroke-dasharray:4 2}.line.s5{stroke-dasharray:1 2}
.line.s8{stroke-width:.9;opacity:.6}.line.s9{stroke-width:1.4;stroke-dasharray:5 3}
.spark{width:132px;height:40px;display:block}.spark .line{stroke-width:1.5}
.forest{width:170px;height:18px;display:block}
.matrix td,.matrix th{padding:4px 12px 4px 0;vertical-align:middle}
.matrix th[scope=row]{position:sticky;left:0;background:var(--paper);z-index:1;color:var(--ink)}
.matrix .small,.study .small{white-space:nowrap}
.study td,.study th{padding-right:14px}
.study th[scope=row]{position:sticky;left:0;background:var(--paper);z-index:1;color:var(--ink);font-weight:600}
a{color:var(--c0)}
.found{list-style:none;margin:0;padding:0;display:grid;gap:5px}
.found li{display:grid;grid-template-columns:4.4em 21em 1fr;gap:0 12px;align-items:baseline}
@media (max-width:900px){.found{gap:10px}.found li{grid-template-columns:4.4em 1fr}.found li>:last-child{grid-column:1/-1}}
.figures+.small{margin-top:8px}
.differs{font-weight:600}
"""


def reference(results: dict) -> str | None:
    """The arm that most comparisons are made against."""
    seconds = [row["b"] for row in results["comparisons"]["final"]]
    return max(seconds, key=seconds.count) if seconds else None


def learning_curves(results: dict) -> Iterator[str]:
    """Held-out accuracy, one chart an arm: mean, bootstrap band, every seed, and the reference's mean."""
    arms = {arm["name"]: arm for arm in results["arms"] if "eval/accuracy" in arm["curves"]}
    accuracies = [value for arm in arms.values() for run in arm["runs"] for _, value in run.get("accuracy", [])]
    y, x = spanning(accuracies, percent=True), Scale(0, results["steps"])
    y = Scale(max(0.0, y.low), min(1.0, y.high), percent=True)
    ground = arms.get(reference(results))
    for name, arm in arms.items():
        curve = arm["curves"]["eval/accuracy"]
        plot = Plot(name, x, y, "training step", "held-out accuracy")
        if ground is not None and ground is not arm:
            there = ground["curves"]["eval/accuracy"]
            plot.line(REFERENCE, there["steps"], there["mean"])
        if "low" in curve:
            plot.band(0, curve["steps"], curve["low"], curve["high"])
        done = [run for run in arm["runs"] if run["state"] == "done"]
        if len(done) > 1:
            for run in done:
                plot.line(SEED, *zip(*run["accuracy"]))
        plot.line(0, curve["steps"], curve["mean"])
        for index, step in enumerate(curve["steps"]):
            cells = {"step": str(step), "mean": words.percent(curve["mean"][index])}
            if "low" in curve:
                cells["95% band"] = f"{words.percent(curve['low'][index])} to {words.percent(curve['high'][index])}"
            plot.point(step, **cells)
        yield plot.figure()


def curve_legend(results: dict) -> str:
    """What the lines of all learning curves are, said once."""
    lines = [(0, "mean over seeds, with its 95% band"), (SEED, "single seeds")]
    lines += [(REFERENCE, f"mean of {name}, for comparison")] if (name := reference(results)) else []
    keys = "".join(
        f'<span><svg class="key" viewBox="0 0 26 12" aria-hidden="true"><path class="line s{series}" d="M0,6H26"/></svg>'
        f"{html.escape(text)}</span>"
        for series, text in lines
    )
    return f'<div class="legend">{keys}</div>'


def sparklines(results: dict) -> str:
    """A table: a row an arm, a column a metric, each column on one scale."""
    arms = [arm for arm in results["arms"] if arm["curves"]]
    names = [name for name in CURVES if name != "eval/accuracy" and _varies(arms, name)]
    scales = {name: _shared_scale(arms, name) for name in names}
    if not names:
        return ""
    head = "".join(
        f'<th scope="col">{html.escape(words.SHORT[name])}{", log" if name in LOG else ""}<br><span class="small">'
        f"{words.quantity(name, scales[name].low)} to {words.quantity(name, scales[name].high)}</span></th>"
        for name in names
    )
    rows = []
    for arm in arms:
        cells = "".join(
            f"<td>{_spark(arm['curves'].get(name), name, scales[name], results['steps'])}</td>" for name in names
        )
        rows.append(f'<tr><th scope="row">{html.escape(arm["name"])}</th>{cells}</tr>')
    return f'<div class="wide"><table class="matrix"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _values(arms: list[dict], name: str) -> list[float]:
    return [
        value for arm in arms if name in arm["curves"] for value in arm["curves"][name]["mean"] if value is not None
    ]


def _varies(arms: list[dict], name: str) -> bool:
    values = _values(arms, name)
    return bool(values) and max(values) > min(values)


def _shared_scale(arms: list[dict], name: str) -> Scale:
    values = _values(arms, name)
    if name in LOG:
        values = [value for value in values if value > 0]
        return Scale(min(values), max(values) if max(values) > min(values) else 2 * max(values), "log")
    return Scale(min(values), max(values))


def _spark(curve: dict | None, name: str, scale: Scale, steps: int) -> str:
    if curve is None:
        return ""
    across = Scale(min(1, curve["steps"][0]), steps if steps > 1 else 2)

    def at(step: float, value: float) -> str:
        x = _PAD + across.at(step) * (_WIDE - 2 * _PAD)
        return f"{x:.1f},{_HIGH - _PAD - scale.at(value) * (_HIGH - 2 * _PAD):.1f}"

    parts = []
    if "low" in curve:
        there = [at(step, value) for step, value in zip(curve["steps"], curve["low"])]
        back = [at(step, value) for step, value in zip(curve["steps"], curve["high"])]
        parts.append(f'<path class="band s0" d="M{"L".join(there + back[::-1])}Z"/>')
    parts.append(f'<path class="line s0" d="M{"L".join(map(at, curve["steps"], curve["mean"]))}"/>')
    first, last = words.quantity(name, curve["mean"][0]), words.quantity(name, curve["mean"][-1])
    said = html.escape(f"{words.SHORT[name]}: {first} at step {curve['steps'][0]}, {last} at step {curve['steps'][-1]}")
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{said}"><title>{said}</title>{"".join(parts)}</svg>'
        f'<span class="small">ends at {last}</span>'
    )


def forest_scale(arms: list[dict], outcome: str) -> Scale:
    """One axis for an outcome of all arms, intervals included as far as they lie in 0 to 100%."""
    ends = [arm["outcomes"][outcome][end] for arm in arms if arm["outcomes"] for end in ("mean", "low", "high")]
    ends = [min(1.0, max(0.0, value)) for value in ends if value is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    return Scale(low, high) if high > low else Scale(low - 0.05, high + 0.05)


def forest(summary: dict | None, scale: Scale) -> str:
    """Mean and interval as a dot and a line; the numbers stand beside it."""
    if not summary:
        return ""
    at = lambda value: 6 + scale.at(value) * 158  # noqa: E731
    line = ""
    if summary["low"] is not None:
        line = f'<path class="error s0" d="M{at(summary["low"]):.1f},9H{at(summary["high"]):.1f}"/>'
    dot = marker(0, at(summary["mean"]), 9)
    return f'<svg class="forest" viewBox="0 0 170 18" aria-hidden="true"><path class="grid" d="M6,17H164"/>{line}{dot}</svg>'


def against(results: dict) -> str:
    """Outcomes against a measured metric: a line for each value of the grid's axis, a point an arm."""
    found = results["against"]
    if not found:
        return ""
    return "".join(_against(found["metric"], outcome, lines) for outcome, lines in found["outcomes"].items() if lines)


def _against(metric: str, outcome: str, lines: dict[str, list[dict]]) -> str:
    points = [point for line in lines.values() for point in line]
    ends = [value for point in points for value in (point["low"], point["mean"], point["high"]) if value is not None]
    y = spanning([max(0.0, min(ends)), min(1.0, max(ends))], percent=True)
    xs = [point["x"] for point in points]
    kind = "log" if min(xs) > 0 and max(xs) > 3 * min(xs) else "linear"
    name = words.SHORT.get(metric, metric)
    plot = Plot(f"{OUTCOMES[outcome].capitalize()} against {name}", spanning(xs, kind), y, name, OUTCOMES[outcome])
    for series, (label, line) in enumerate(lines.items()):
        series %= 6
        plot.line(series, [point["x"] for point in line], [point["mean"] for point in line], label, markers=True)
        for point in line:
            # Lines that lie on each other are told apart by a little shift, smaller than any difference of gaps.
            shifted = point["x"] * (1 + 0.012 * (series - 2.5)) if kind == "log" else point["x"]
            if point["high"] is not None:
                plot.intervals(series, [shifted], [point["mean"]], [point["high"] - point["mean"]])
            gap = words.quantity(metric, point["x"])
            plot.point(point["x"], arm=point["arm"], **{name: gap, OUTCOMES[outcome]: words.spread(point)})
    return plot.figure()
