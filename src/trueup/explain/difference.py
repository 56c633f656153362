"""Causes in which the two sides compute other logits: weights, cache, prompt, and unknown."""

from __future__ import annotations

import math

import numpy as np

from trueup.explain.distribution import fit_line
from trueup.explain.finding import Finding
from trueup.explain.floor import NORMAL, excess_share, floor_name
from trueup.explain.sample import Sample
from trueup.explain.significance import clustered_z, normal_tail, robust_scale, two_groups
from trueup.explain.where import describe

WHITE = 0.10
"""Lag-1 correlation of the gap that noise of kernels and quantisation stays below (measured: .00 to .05)."""
TAILS = 9.5
BEYOND_NOISE = 1.2
"""Fresh noise of this scale comes from no kernel or 8-bit quantisation that was measured (up to .72)."""
APART = math.log(1.6)
TOKENS_A_ROW = 8


class Rows:
    """Log of the mean |gap| of each response that has enough informative tokens, with its standard error."""

    def __init__(self, sample: Sample, tokens: np.ndarray):
        size = np.minimum(np.abs(sample.gap_N[tokens]), 4.0)
        row = sample.row_N[tokens]
        count = len(sample.lengths)
        n = np.bincount(row, minlength=count)
        mean = np.bincount(row, size, count) / np.maximum(n, 1)
        square = np.bincount(row, size * size, count) / np.maximum(n, 1)
        self.rows = np.flatnonzero((n >= TOKENS_A_ROW) & (mean > 0))
        mean, n = mean[self.rows], n[self.rows]
        self.scale = np.log(mean)
        self.error = np.sqrt(np.maximum(square[self.rows] - mean**2, 0) / n) / mean
        self.step = sample.columns["step"][self.rows]
        self.group = sample.columns["group"][self.rows]
        self.lag = sample.columns["lag"][self.rows]
        steps, at = np.unique(self.step, return_inverse=True)
        self.steps, counts = steps, np.bincount(at)
        self.by_step = np.bincount(at, self.scale) / np.maximum(counts, 1)
        self.step_error = np.sqrt(
            np.bincount(at, (self.scale - self.by_step[at]) ** 2) / np.maximum(counts - 1, 1) / counts
        )
        self.centred = self.scale - self.by_step[at]


def other_logits(sample: Sample) -> Finding | None:
    """`weights`, `cache` or `prompt`: is the gap more than noise, and where does it sit?

    Rounding errors of two kernels, or of int8, are fresh at every token: the signed gap is uncorrelated along a response.
    Other weights, keys of older weights or another prompt shift whole stretches of text in the same direction: the
    correlation with the next token exceeds WHITE. That, a scale beyond the ordinary, a scale that grows over steps, or
    two kinds of responses within a step say that something is wrong; which of them holds says what.
    """
    free = sample.free()
    if len(free) < 100:
        return None
    line = fit_line(sample, free)
    residual_N = np.zeros(len(sample.row_N))
    residual_N[free] = sample.gap_N[free] - line.at(sample.odds_N[free])
    scale = robust_scale(residual_N[free])
    floor = floor_name(sample.engine, 0.0)
    correlation, z = next_token_correlation(sample, free, residual_N, scale)
    rows = Rows(sample, free)
    if len(rows.rows) < 4:
        return None
    excess = scale > (NORMAL[floor] if sample.engine else NORMAL["quantised"])
    # Beyond the ordinary scale the question is no longer whether, only which kind.
    systematic = (z > 3.5 and correlation > WHITE) or (excess and correlation > 0.08)
    mixed = _mixture(rows)
    growth = _growth(rows)
    p = normal_tail(z) if systematic else 1e-4
    if mixed is not None and (systematic or excess or mixed[2] > math.log(2)):
        upper, kind, distance = mixed
        return _part(sample, rows, upper, kind, distance, p)
    if not (systematic or excess or growth):
        return None
    lowest = math.exp(float(rows.by_step.min())) if len(rows.steps) > 1 else math.inf
    share = excess_share(sample, free, lowest)
    every = rows.rows
    measured = f"mean |log-odds gap| {math.exp(float(np.mean(rows.scale))):.2f}, correlation with the next token {correlation:.2f}"
    if growth is not None:
        first, ratio = growth
        return Finding(
            "weights",
            1 - 12 * p,
            describe(sample, every[rows.step > first], None),
            f"The gap grows over steps, to {ratio:.1f} times that of step {first}, and is systematic ({measured}): the "
            "sampler stays behind while the learner moves on; updates were never delivered.",
            "Check that the trained weights (adapter included) reach the engine at every sync; compare a canary batch.",
            every[rows.step > first],
            share,
        )
    if _heavy_tails(residual_N[free]):
        return Finding(
            "prompt",
            0.75,
            describe(sample, every),
            f"The gap is systematic ({measured}), and concentrated in few, decisive tokens, in all groups: the same "
            "model under another context.",
            "Compare the learner's input ids with the engine's prompt ids: chat template, system message, BOS.",
            every,
            share,
        )
    if not systematic and scale < BEYOND_NOISE:
        return Finding(
            "unknown",
            0.9,
            describe(sample, every),
            f"The gap is larger than {floor} explains ({measured}) but behaves like fresh noise at every token; not "
            "temperature, truncation, misalignment, weights, cache or prompt.",
            "Compare the engine's kernels and quantisation with the learner's: trueup measure splits the gap.",
            every,
            share,
        )
    return Finding(
        "weights",
        min(0.9, 1 - 12 * p) if systematic else 0.6,
        describe(sample, every),
        f"The gap is systematic ({measured}), in all responses and positions"
        + (", the same at every step" if len(rows.steps) > 1 else "")
        + ": part of the weights (layers, an adapter) did not arrive, or the sampler is a fixed number of versions behind.",
        "Check which parameters the engine received (names, shards, adapter) and reset its caches; compare a canary batch.",
        every,
        share,
    )


def next_token_correlation(
    sample: Sample, free: np.ndarray, residual_N: np.ndarray, scale: float
) -> tuple[float, float]:
    """Correlation of the clipped residual gap with that of the next token, and z against WHITE, clustered by prompt."""
    pair = free[:-1][(free[1:] == free[:-1] + 1) & (sample.row_N[free[1:]] == sample.row_N[free[:-1]])]
    if len(pair) < 50 or scale == 0:
        return 0.0, 0.0
    bounded_N = np.clip(residual_N, -4 * scale, 4 * scale)
    product = bounded_N[pair] * bounded_N[pair + 1]
    square = (bounded_N[pair] ** 2 + bounded_N[pair + 1] ** 2) / 2
    unit = sample.cluster_N[pair]
    z = clustered_z(np.bincount(unit, product), np.bincount(unit, square), WHITE)
    return float(product.sum() / square.sum()), z


def _growth(rows: Rows) -> tuple[int, float] | None:
    """Scale rises from the first step to the last, by half at least and by more than 4 standard errors."""
    if len(rows.steps) < 2 or len(rows.rows) < 8:
        return None
    third = max(1, len(rows.steps) // 3)
    early, late = rows.by_step[:third], rows.by_step[-third:]
    rise = late.mean() - early.mean()
    error = math.sqrt((rows.step_error[:third] ** 2).sum() + (rows.step_error[-third:] ** 2).sum()) / third
    if rise < math.log(1.5) or (error > 0 and rise < 4 * error):
        return None
    return int(rows.steps[0]), math.exp(rise)


def _mixture(rows: Rows) -> tuple[np.ndarray, str, float] | None:
    """Two kinds of responses within steps -> (mask of the upper kind, `group` or `row`, distance in logs).

    The split must beat a normal sample's best split (parametric bootstrap, 0.5% by prompt, 0.2% by response), and the means must lie apart by APART
    and by four times what the finite length of responses makes of one scale.
    """
    noise = math.sqrt(float(np.mean(rows.error**2)))
    groups, at = np.unique(rows.group, return_inverse=True)
    counts = np.bincount(at)
    if len(groups) >= 4 and np.median(counts) >= 2:
        mean = np.bincount(at, rows.centred) / counts
        p, upper, distance = two_groups(mean)
        within = math.sqrt(float(np.mean((rows.centred - mean[at]) ** 2)) * 2)
        if p < 0.005 and distance > max(APART, 4 * noise / math.sqrt(2)) and within < distance / 2:
            return upper[at], "group", distance
    p, upper, distance = two_groups(rows.centred)
    if p < 0.002 and distance > max(APART, 4 * noise):
        return upper, "row", distance
    return None


def _part(sample: Sample, rows: Rows, upper: np.ndarray, kind: str, distance: float, p: float) -> Finding:
    hit = rows.rows[upper]
    size = np.exp(rows.scale)
    share = float((size[upper] - np.exp(np.mean(rows.scale[~upper]))).sum() / size.sum())
    sizes = f"{math.exp(distance):.1f} times that of the others of the same step"
    if kind == "group":
        return Finding(
            "cache",
            max(0.9, 1 - 12 * p),
            describe(sample, hit),
            f"Some prompts' responses have a gap {sizes}, all samples of a prompt alike: what they share, the "
            "prompt's cached prefix, was computed under other weights.",
            "Reset the engine's prefix cache after every weight update (vLLM: reset_prefix_cache).",
            hit,
            share,
        )
    return Finding(
        "weights",
        0.8,
        describe(sample, hit),
        f"Some responses have a gap {sizes}, whatever their prompt: some engine replicas sampled with other weights.",
        "Check that every replica received the update before it sampled; stamp sampler_version.",
        hit,
        share,
    )


def _heavy_tails(residual: np.ndarray) -> bool:
    """Rather another prompt than other weights.

    Other weights disturb every token; another instruction leaves most tokens near agreement and overturns a few (format,
    wording). Kurtosis of the residual gap, which is clipped at 8: 11 to 38 in halves of the real prompt case, 5 to 8 in those
    of three cases of weights; the bound is between. This is the weakest of the decisions.
    """
    square = residual**2
    return float(np.mean(square**2)) > TAILS * float(np.mean(square)) ** 2


def unbalanced(sample: Sample) -> Finding | None:
    """`unknown`: E[rho] differs from 1, which no noise explains, and no cause was found for it."""
    tokens = np.flatnonzero(sample.known_N & ~sample.claimed_N)
    if len(tokens) < 100:
        return None
    log_rho = np.clip(sample.log_rho_N[tokens], -20, 20)
    unit, rho = sample.cluster_N[tokens], np.exp(log_rho)
    z = clustered_z(np.bincount(unit, rho - 1), np.bincount(unit).astype(float))
    noise = float(np.mean(log_rho**2)) / 2
    if abs(z) < 5 or abs(float(rho.mean()) - 1) < 0.5 * noise:
        return None
    rows = sample.rows_of(tokens)
    return Finding(
        "unknown",
        0.9,
        describe(sample, rows),
        f"E[rho] is {rho.mean():.4f} (z {z:.1f}) and must be 1; no temperature, truncation, shift or constant explains it.",
        "Check which distribution each side's log-probs belong to (penalties, logit bias, bad words, grammar masks).",
        rows,
        share=min(1.0, abs(float(rho.mean()) - 1) / max(float(np.abs(log_rho).mean()), 1e-12)),
    )
