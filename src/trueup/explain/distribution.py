"""Causes in which both sides mean the same logits and turn them into other distributions: temperature, truncated-support."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.floor import excess_share
from trueup.explain.responses import Rows
from trueup.explain.sample import Sample
from trueup.explain.significance import as_normal, clustered_test, normal_tail, two_groups, two_sided
from trueup.explain.where import describe

EXPLAINED = 0.5
"""Share of the variance of the log-odds difference that a temperature must account for. A temperature is the whole
difference but for tokens with several rivals; other weights tilt the log-odds too, and leave most of the variance."""

TOKENS_A_SLOPE = 24
BELOW_ONE = -4.0
ALONE = -5.0
PROMPTS_A_PART = 8
"""Prompts that a part of the steps needs at least to be judged by itself."""


@dataclass
class Line:
    """gap = intercept + slope * odds over some tokens, with the slope's error clustered by prompt."""

    slope: float
    intercept: float
    explained: float
    z: float

    def at(self, odds: np.ndarray) -> np.ndarray:
        return self.intercept + self.slope * odds


def fit_line(sample: Sample, tokens: np.ndarray) -> Line:
    odds, gap = sample.odds_N[tokens], sample.gap_N[tokens]
    centred = odds - odds.mean()
    square = float(centred @ centred)
    if square <= 0:
        return Line(0.0, float(gap.mean()), 0.0, 0.0)
    slope = float(centred @ gap) / square
    intercept = float(gap.mean() - slope * odds.mean())
    residual = gap - intercept - slope * odds
    score_B = np.bincount(sample.cluster_N[tokens], centred * residual)
    error = math.sqrt(float(score_B @ score_B)) / square
    variance = float(np.var(gap))
    explained = 1 - float(np.mean(residual**2)) / variance if variance > 0 else 0.0
    z = as_normal(slope / error, len(np.unique(sample.cluster_N[tokens])) - 1) if error > 0 else 0.0
    return Line(slope, intercept, explained, z)


def residual_gap(sample: Sample, tokens: np.ndarray) -> np.ndarray:
    """[N]: the gap of these tokens less its line over the log-odds, 0 elsewhere."""
    line = fit_line(sample, tokens)
    residual_N = np.zeros(len(sample.row_N))
    residual_N[tokens] = sample.gap_N[tokens] - line.at(sample.odds_N[tokens])
    return residual_N


def temperature(sample: Sample) -> Finding | None:
    """Log-odds of one side are k times the other's, in all responses or in some.

    p_T is proportional to p^(1/T): between two tokens the log-odds scale by exactly 1/T, and against several rivals nearly
    so. The gap of log-odds is then a line through the middle of the scale: confident tokens err to one side and unlikely
    ones to the other. On the mean of both log-odds its slope is b = 2 (k-1)/(k+1). Each believed temperature of the
    dump is tested for itself, and where the slopes of single responses are of two kinds the steeper kind alone. Needed: z
    of b at 1% over all causes, EXPLAINED, and opposite signs at both ends where both have tokens (a renormalisation
    shifts both the same way).
    """
    free = sample.free()
    believed_N = sample.columns["temperature"][sample.row_N[free]]
    hits, lines, p_worst = [], [], 0.0
    values = np.unique(believed_N)
    for value in values[:20]:
        tokens = free[believed_N == value]
        steep = _steep(sample, tokens)
        for part in (steep, tokens) if steep is not None else (tokens,):
            if len(part) < 100 or len(sample.rows_of(part)) < 4:
                continue
            line = fit_line(sample, part)
            p = two_sided(line.z) * len(values)
            if p < 1e-3 and line.explained >= EXPLAINED and _opposite(sample, part, line.slope):
                hits.append((value, part))
                lines.append(line)
                p_worst = max(p_worst, p)
                break
    if not hits:
        return None
    tokens = np.concatenate([t for _, t in hits])
    believed, line = hits[0][0], lines[0]
    k = (2 + line.slope) / (2 - line.slope)
    rows = sample.rows_of(tokens)
    return Finding(
        "temperature",
        1 - p_worst,
        describe(sample, rows),
        f"The learner's log-odds are {k:.2f} times the sampler's (r2 {line.explained:.2f}): a temperature of {1 / k:.2f} "
        f"on one side only; the dump says {believed:.2f}.",
        _temperature_remedy(k, believed),
        rows,
        share=excess_share(sample, tokens) * sample.mass_of(rows),
    )


def _steep(sample: Sample, tokens: np.ndarray) -> np.ndarray | None:
    """The tokens of the responses whose own slope is of the steeper of two kinds; None where there is one kind."""
    count, row = len(sample.lengths), sample.row_N[tokens]
    n = np.bincount(row, minlength=count)
    mean = lambda values: np.bincount(row, values, count) / np.maximum(n, 1)  # noqa: E731
    odds, gap = sample.odds_N[tokens], sample.gap_N[tokens]
    centred = odds - mean(odds)[row]
    square = np.bincount(row, centred**2, count)
    rows = np.flatnonzero((n >= TOKENS_A_SLOPE) & (square > 0))
    if len(rows) < 8:
        return None
    slope_B = np.bincount(row, centred * gap, count) / np.maximum(square, 1e-12)
    residual = gap - mean(gap)[row] - slope_B[row] * centred
    error_B = np.sqrt(np.bincount(row, residual**2, count) / np.maximum(n, 1) / np.maximum(square, 1e-12))
    p, upper, distance = two_groups(slope_B[rows])
    if p > 1e-3 or distance < max(0.1, 4 * float(np.median(error_B[rows]))):
        return None
    above = abs(slope_B[rows[upper]].mean()) > abs(slope_B[rows[~upper]].mean())
    steep, flat = (rows[upper], rows[~upper]) if above else (rows[~upper], rows[upper])
    line = fit_line(sample, tokens[np.isin(row, flat)])
    if line.explained >= EXPLAINED / 2 and line.slope * slope_B[steep].mean() > 0:
        return None  # The flatter kind has the temperature too.
    return tokens[np.isin(row, steep)]


def _opposite(sample: Sample, tokens: np.ndarray, slope: float) -> bool:
    odds, gap = sample.odds_N[tokens], sample.gap_N[tokens]
    low, high = gap[odds < -2], gap[odds > 2]
    signs = [np.sign(low.mean()) == -np.sign(slope)] if len(low) >= 20 else []
    signs += [np.sign(high.mean()) == np.sign(slope)] if len(high) >= 20 else []
    return all(signs)


def _temperature_remedy(k: float, believed: float) -> str:
    if abs(believed - 1) > 0.02 and abs(math.log(k * believed)) < abs(math.log(k / believed)):
        return (
            "The sampler's log-probs are raw: ask the engine for those it sampled from (vLLM: "
            "logprobs_mode=processed_logprobs)."
        )
    if abs(believed - 1) > 0.02:
        return f"The learner forgot the temperature: divide its logits by {believed:.2f} before the log-softmax."
    return (
        "The sampler uses a temperature the dump does not know of (a generation_config default?), or one side scores at "
        "another: give both the same."
    )


def truncated_support(sample: Sample) -> Finding | None:
    """E_mu[rho] is below 1 by the probability that was cut off.

    When mu is pi renormalised over a kept set of mass K, rho = K on every token it can sample, so E[rho] = E[K] < 1, while
    for two distributions over the same tokens E_mu[rho] = 1 whatever their difference. Noise of size s only spreads rho;
    it does not move the mean. Two conditions: z of E[rho] - 1 below BELOW_ONE (and half of that by prompt); and 1 - E[rho] at
    least half of the noise's own KL (mean log^2 rho / 2), because a sample mean of very skewed ratios falls short of 1
    by a fraction of that without any cut.

    Other faults in other steps or responses would drown it. So the steps, and the two kinds of responses where there
    are two, are looked at one by one, at a level of ALONE; the parts where it holds are joined by those that lean the same
    way.
    """
    tokens = np.flatnonzero(sample.known_N & ~sample.claimed_N)
    if len(tokens) < 100:
        return None
    parts = [part for part in _parts(sample, tokens) if len(part) >= 100]
    holds = [_cut(sample, part, ALONE) is not None for part in parts]
    joins = [hold or _cut(sample, part, -1.0) is not None for hold, part in zip(holds, parts)]
    if any(holds) and not all(joins):
        return _cut(sample, np.sort(np.concatenate([part for part, join in zip(parts, joins) if join])), ALONE)
    return _cut(sample, tokens, BELOW_ONE)


def _parts(sample: Sample, tokens: np.ndarray) -> list[np.ndarray]:
    """Tokens by step, and within that by kind of response (size of the gap) where there are two kinds."""
    rows = Rows(sample, sample.free())
    kind_B = np.zeros(len(sample.lengths), int)
    if len(rows.rows) >= 8:
        p, upper, distance = two_groups(rows.centred)
        if p < 1e-3 and distance > math.log(2):
            kind_B[rows.rows[upper]] = 1
    steps, step_B = np.unique(sample.columns["step"], return_inverse=True)
    apart = max(1, min(len(steps), len(np.unique(sample.cluster_N[tokens])) // PROMPTS_A_PART))
    step_B = step_B * apart // len(steps)
    key = (2 * step_B + kind_B)[sample.row_N[tokens]]
    return [tokens[key == value] for value in np.unique(key)]


def _lost(sample: Sample, tokens: np.ndarray) -> tuple[float, bool]:
    """1 - E[rho], and whether that is at least half of the noise's KL."""
    log_rho = np.clip(sample.log_rho_N[tokens], -20, 20)
    lost = 1 - float(np.exp(log_rho).mean())
    return lost, lost >= 0.5 * float(np.mean(log_rho**2)) / 2


def _cut(sample: Sample, tokens: np.ndarray, bound: float) -> Finding | None:
    log_rho = np.clip(sample.log_rho_N[tokens], -20, 20)
    rho, unit = np.exp(log_rho), sample.cluster_N[tokens]
    # Given what came before, rho - 1 has mean 0 whatever the noise: a martingale, whose variance needs no clusters.
    # Clusters would count it as error that prompts differ in what is cut off; they only must agree on the sign.
    z = float((rho - 1).sum() / math.sqrt(max(float(((rho - 1) ** 2).sum()), 1e-300)))
    agree = clustered_test(np.bincount(unit, rho - 1), np.bincount(unit).astype(float))
    lost, enough = _lost(sample, tokens)
    if not z < bound or not agree < min(-2.0, bound / 2) or not enough:
        return None
    noise = float(np.mean(log_rho**2)) / 2
    alone_N = (sample.sampler_N[tokens] == 0) & (sample.learner_N[tokens] < -1e-3)
    kind = "top-p or min-p" if alone_N.mean() > 0.02 else "top-k"
    detail = f"the sampler's log-prob is exactly 0 on {alone_N.mean():.0%} of tokens the learner is not sure of, so "
    detail += f"one token alone was kept there ({kind})" if kind != "top-k" else ""
    if kind == "top-k":
        detail = "single kept tokens are rare, as with top-k"
    rows = sample.rows_of(tokens)
    unlikely = float(sample.learner_N[tokens].min())
    total = float(np.abs(log_rho).sum())
    # What a shift by -log K explains: the systematic part of the negative side.
    explained = max(0.0, -float(log_rho.sum()) - noise * len(tokens)) / total if total else 0.0
    return Finding(
        "truncated-support",
        1 - 12 * normal_tail(-z),
        describe(sample, rows),
        f"E[rho] is {1 - lost:.4f} (z {z:.1f}): {lost:.2%} of the learner's probability cannot be sampled; {detail}; the "
        f"least likely token sampled has {math.exp(unlikely):.1e}.",
        "Sample with top_p=1, top_k=-1, min_p=0 (check generation_config defaults), or apply the same truncation to the "
        "learner before its log-softmax.",
        rows,
        share=min(1.0, explained) * sample.mass_of(rows),
    )
