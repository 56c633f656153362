"""Charts of the gap itself: the distribution of log rho, and where the gap lies by probability, position and length."""

from __future__ import annotations

import math

import numpy as np

from trueup.correction import Correction
from trueup.report.binned import POSITIONS, PROBABILITY_LOGITS, Binned
from trueup.report.gathered import Gathered
from trueup.report.histogram import Histogram
from trueup.report.plot import Plot
from trueup.report.scale import Scale, number, spanning

_SIDE = 60  # bars on each side of 0
_LEVELS = {
    "token": ("Distribution of log rho, tokens", "log rho of a token", "tokens"),
    "sequence": ("Distribution of log rho, whole responses", "sum of log rho over a response", "responses"),
    "geometric": ("Distribution of log rho, response means", "mean of log rho over a response", "responses"),
}


def ratio_distributions(gathered: Gathered, correction: Correction | None) -> list[str]:
    """Per token always, and per response at the correction's level; its bounds are drawn where they act."""
    level = correction.level if correction else "token"
    levels = ["token", level if level in ("sequence", "geometric") else "sequence"]
    return [_distribution(gathered.histograms[name], name, correction if name == level else None) for name in levels]


def _distribution(histogram: Histogram, level: str, correction: Correction | None) -> str:
    title, x_label, counted = _LEVELS[level]
    bounds = _bounds(correction)
    # A few extreme values must not squeeze all others into one bar: they are counted at the edge instead.
    few = min(10 / histogram.total, 1e-4)
    far = min(histogram.quantile(1 - few), 12 * histogram.quantile(0.999))
    reach = max([far, *(1.2 * abs(value) for value, _ in bounds if abs(value) < 5)])
    edges, counts, below, above = histogram.within(reach, _SIDE)
    first, last = _shown(edges, counts, [value for value, _ in bounds])
    edges, counts = edges[first : last + 1], counts[first:last]
    top = max(int(counts.max()), 2)
    plot = Plot(
        title, Scale(edges[0], edges[-1]), Scale(0.6, top * 3, "log"), f"{x_label} (nats)", f"number of {counted} (log)"
    )
    plot.bars(0, edges, counts)
    plot.upright(0, kind="zero")
    for value, label in bounds:
        plot.upright(value, label)
    for low, high, count in zip(edges, edges[1:], counts):
        if count:
            plot.point((low + high) / 2, **{"log rho": f"{low:.3g} to {high:.3g}", counted: f"{count:,}"})
    notes = [f"{number_of:,} below this range" for number_of in [below] if number_of]
    notes += [f"{number_of:,} above this range" for number_of in [above] if number_of]
    said = f"{histogram.total:,} {counted}" + (f"; {' and '.join(notes)}" if notes else "")
    if correction is None:
        return plot.figure(f"{said}.")
    acts = f" Correction: {correction}." if bounds else f" Correction: {correction}; it has no bounds on this ratio."
    return plot.figure(said + "." + acts)


def _shown(edges: np.ndarray, counts: np.ndarray, bounds: list[float]) -> tuple[int, int]:
    """The bars from the first to the last that holds anything, with 0 and the bounds in sight."""
    held, air = np.flatnonzero(counts), max(2, len(counts) // 25)
    marks = [*np.searchsorted(edges, [0.0, *bounds]), *held[[0, -1]]] if len(held) else [0, len(counts)]
    return max(0, int(min(marks)) - air), min(len(counts), int(max(marks)) + 1 + air)


def _bounds(correction: Correction | None) -> list[tuple[float, str]]:
    """(log of the bound, its name); with the filters on the ratio itself, which are bounds too."""
    if correction is None:
        return []
    verb = {"truncate": "truncated", "mask": "dropped", "none": ""}[correction.bound]
    ends = [(correction.low, correction.high, verb)] if correction.level != "none" else []
    ends += [(f.low, f.high, "dropped") for f in correction.filters if (f.criterion, f.aggregate) == ("ratio", "token")]
    found = []
    for low, high, what in ends:
        found += [(math.log(low), f"{what} below {low:g}")] if low > 0 else []
        found += [(math.log(high), f"{what} above {high:g}")] if 0 < high < math.inf else []
    return found


def gap_charts(gathered: Gathered) -> list[str]:
    """Binned means with 95% intervals clustered by response."""
    return [
        _by_probability(gathered.by_probability),
        _by_position(gathered.by_position, "Gap by position", "position in the response (log)", "mean |log rho|, nats"),
        _by_position(
            gathered.ratio_by_position,
            "E[rho] by position",
            "position in the response (log)",
            "mean of rho",
            one=True,
            caption="It must be 1 at every position, so a trend here is a fault, not noise.",
        ),
        _by_position(
            gathered.by_length,
            "Gap by response length",
            "tokens in the response (log)",
            "mean |log rho|, nats",
        ),
    ]


def step_charts(gathered: Gathered) -> list[str]:
    """For dumps, which have no metrics.jsonl: does the gap grow with the steps?"""
    steps, kl = gathered.kl_by_step.binned()
    if len(steps) < 2:
        return []
    _, ratio = gathered.ratio_by_step.binned()
    return [
        _by_step(steps, kl, "KL by step", "KL(mu, pi), k3, nats a token", False),
        _by_step(steps, ratio, "E[rho] by step", "mean of rho", True),
    ]


def _by_step(steps: list[int], binned: Binned, title: str, y_label: str, one: bool) -> str:
    mean, half = binned.means()
    mean = mean + 1 if one else mean
    widths = np.where(np.isfinite(half), half, 0)
    y = spanning([*(mean - widths), *(mean + widths)], include=1.0) if one else _roof(mean, half)
    plot = Plot(title, spanning(steps), y, "training step", y_label)
    if one:
        plot.level(1, "1")
    plot.band(0, steps, mean - half, mean + half)
    plot.line(0, steps, mean, markers=len(steps) <= 30)
    for step, value, width, tokens in zip(steps, mean, half, binned.tokens):
        plot.point(step, step=str(step), **_cells(value, width, tokens))
    return plot.figure()


def _by_probability(binned: Binned) -> str:
    mean, half = binned.means()
    inner = (PROBABILITY_LOGITS[1:] + PROBABILITY_LOGITS[:-1]) / 2
    centres = np.concatenate([[PROBABILITY_LOGITS[0] - 0.4], inner, [PROBABILITY_LOGITS[-1] + 0.4]])
    probability = 1 / (1 + np.exp(-centres))
    plot = Plot(
        "|pi - mu| by probability",
        Scale(probability[0] / 1.5, 1 - (1 - probability[-1]) / 1.5, "logit"),
        _roof(mean, half),
        "sampler's probability of the token (logit)",
        "mean |pi - mu|",
    )
    joined = binned.responses > 1  # single responses stand alone: a line to them would say more than is known
    plot.line(0, probability[joined], mean[joined])
    plot.intervals(0, probability, mean, half)
    for at, value, width, tokens in zip(probability, mean, half, binned.tokens):
        if tokens:
            plot.point(at, **{"mu near": f"{at:.3g}"}, **_cells(value, width, tokens))
    return plot.figure("Hollow: one response only, no interval." if (binned.responses == 1).any() else "")


def _by_position(binned: Binned, title: str, x_label: str, y_label: str, one: bool = False, caption: str = "") -> str:
    mean, half = binned.means()
    mean = mean + 1 if one else mean  # E[rho] is gathered as rho - 1
    shown = binned.tokens > 0
    last = int(np.flatnonzero(shown)[-1])
    ends = np.append(POSITIONS[1:], POSITIONS[-1] * 2)
    centres = np.sqrt(POSITIONS * np.maximum(ends - 1, POSITIONS))
    first = int(np.flatnonzero(shown)[0])
    x = Scale(max(centres[first] * 0.85, 0.8), max(centres[last] * 1.15, centres[first] * 2), "log")
    if one:
        # Early bins with a few tokens may reach far; they must not flatten the rest.
        widths = np.where(np.isfinite(half), half, 0)[shown]
        y = spanning([*(mean[shown] - widths), *(mean[shown] + widths)], include=1.0)
    else:
        y = _roof(mean, half)
    plot = Plot(title, x, y, x_label, y_label)
    if one:
        plot.level(1, "1")
    joined = binned.responses > 1
    plot.line(0, centres[joined], mean[joined])
    plot.intervals(0, centres, mean, half)
    for low, end, at, value, width, tokens in zip(POSITIONS, ends, centres, mean, half, binned.tokens):
        if tokens:
            where = f"{low:,}" if end - low == 1 else f"{low:,} to {end - 1:,}"
            plot.point(at, **{"tokens" if "length" in title else "position": where}, **_cells(value, width, tokens))
    return plot.figure(caption)


def _roof(mean: np.ndarray, half: np.ndarray) -> Scale:
    """From 0 to above the highest mean; an interval from a handful of responses may run out of the chart."""
    known = np.isfinite(mean)
    ends = np.where(np.isfinite(half), np.minimum(half, mean), 0)[known] + mean[known]
    return Scale(0, float(max(ends, default=1.0)) * 1.08 or 1.0)


def _cells(mean: float, half: float, tokens: float) -> dict[str, str]:
    interval = f"{number(mean - half)} to {number(mean + half)}" if math.isfinite(half) else "not known"
    return {"mean": number(mean), "95% interval": interval, "tokens measured": f"{int(tokens):,}"}
