"""Curves of a run over its steps, from metrics.jsonl."""

from __future__ import annotations

import math

from trueup.report.plot import Plot
from trueup.report.scale import Scale, number, spanning

_POINTS = 240  # more than a chart of 380 units can show
_PERCENT = lambda value: "-" if value is None else f"{value:.2%}"  # noqa: E731


_REWARD = [("reward/mean", "mean reward"), ("eval/accuracy", "held-out accuracy")]
_KL = [("mismatch/kl_k3", "k3 estimate of KL(mu, pi)")]
_ESS = [("mismatch/ess_token", "of tokens"), ("mismatch/ess_sequence", "of responses")]
_CUT = [("correction/truncated_fraction", "truncated"), ("correction/masked_fraction", "dropped")]
_MOVED = [("mismatch/prob_diff_mean", "mean"), ("mismatch/prob_diff_q99", "99% lie below")]
_SPEED = [("throughput/tokens_per_second", "whole step"), ("throughput/rollout_tokens_per_second", "rollout alone")]


def curves(metrics: list[dict]) -> list[str]:
    """One figure a question; those whose numbers the run did not log are left out."""
    rows = _thinned(sorted(metrics, key=lambda row: row["step"]))
    figures = [
        _chart(rows, "Reward and held-out accuracy", "share", _REWARD),
        _chart(rows, "KL between sampler and learner", "nats a token (log)", _KL, kind="log"),
        _ratio(rows),
        _chart(rows, "Effective sample size", "share of the batch", _ESS, percent=True),
        _chart(rows, "Cut by the correction", "share of the tokens", _CUT, percent=True, include=0),
        _chart(rows, "Probability moved at the sampled token", "|pi - mu| (log)", _MOVED, kind="log"),
        _chart(rows, "Response length", "tokens", [("response/length_mean", "mean length")]),
        _chart(rows, "Policy entropy", "nats a token", [("policy/entropy", "mean entropy")]),
        _chart(rows, "Throughput", "tokens a second (log)", _SPEED, kind="log"),
    ]
    return [figure for figure in figures if figure]


def _chart(rows, title, y_label, series, kind="linear", percent=False, include=None) -> str:
    present = [(name, label) for name, label in series if any(_value(row, name) is not None for row in rows)]
    if not present:
        return ""
    values = {name: [_value(row, name) for row in rows] for name, _ in present}
    steps = [row["step"] for row in rows]
    scale = spanning([value for column in values.values() for value in column], kind, include, percent)
    plot = Plot(title, _steps(steps), scale, "training step", y_label)
    for index, (name, label) in enumerate(present):
        sparse = sum(value is not None for value in values[name]) < len(rows) / 2
        plot.line(index, steps, values[name], label, markers=sparse)
    show = _PERCENT if percent else number
    for index, step in enumerate(steps):
        said = {label: show(values[name][index]) for name, label in present if values[name][index] is not None}
        plot.point(step, step=str(step), **said)
    return plot.figure()


def _ratio(rows: list[dict]) -> str:
    names = ("mismatch/rho_mean", "mismatch/rho_mean_low", "mismatch/rho_mean_high")
    mean, low, high = ([_value(row, name) for row in rows] for name in names)
    if not any(value is not None for value in mean):
        return ""
    steps = [row["step"] for row in rows]
    plot = Plot(
        "E[rho], which must be 1", _steps(steps), spanning(low + high, include=1.0), "training step", "mean of rho"
    )
    plot.level(1, "1")
    plot.band(0, steps, low, high)
    plot.line(0, steps, mean, "mean and its 95% interval")
    for step, *values in zip(steps, mean, low, high):
        if values[0] is not None:
            said = ["-" if value is None else f"{value:.5f}" for value in values]
            plot.point(step, step=str(step), **{"E[rho]": said[0], "95% interval": f"{said[1]} to {said[2]}"})
    return plot.figure()


def _steps(steps: list[int]) -> Scale:
    return Scale(min(steps), max(steps)) if len(set(steps)) > 1 else Scale(steps[0] - 1, steps[0] + 1)


def _value(row: dict, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _thinned(rows: list[dict]) -> list[dict]:
    """Every k-th step and each one with an evaluation, which are few and would otherwise be lost."""
    every = -(-len(rows) // _POINTS)
    if every <= 1:
        return rows
    return [
        row for index, row in enumerate(rows) if index % every == 0 or index == len(rows) - 1 or "eval/accuracy" in row
    ]
