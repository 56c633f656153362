"""Causes in which both sides mean the same logits and turn them into other distributions: temperature, truncated-support."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.floor import excess_share
from trueup.explain.sample import Sample
from trueup.explain.significance import clustered_z, normal_tail, two_sided
from trueup.explain.where import describe

EXPLAINED = 0.5
"""Share of the variance of the log-odds difference that a temperature must account for. A temperature is the whole
difference but for tokens with several rivals; other weights tilt the log-odds too, and leave most of the variance."""


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
    return Line(slope, intercept, explained, slope / error if error > 0 else 0.0)


def temperature(sample: Sample) -> Finding | None:
    """Log-odds of one side are k times the other's.

    p_T is proportional to p^(1/T): between two tokens the log-odds scale by exactly 1/T, and against several rivals nearly
    so. The gap of log-odds is then a line through the middle of the scale: confident tokens err to one side and unlikely
    ones to the other. On the mean of both log-odds its slope is b = 2 (k-1)/(k+1). Each believed temperature of the
    dump is tested for itself. Needed: z of b at 1% over all causes, EXPLAINED, and opposite signs at both ends where
    both have tokens (a renormalisation shifts both the same way).
    """
    free = sample.free()
    believed_N = sample.columns["temperature"][sample.row_N[free]]
    hits, lines, p_worst = [], [], 0.0
    values = np.unique(believed_N)
    for value in values[:20]:
        tokens = free[believed_N == value]
        if len(tokens) < 100 or len(sample.rows_of(tokens)) < 4:
            continue
        line = fit_line(sample, tokens)
        p = two_sided(line.z) * len(values)
        if p < 1e-3 and line.explained >= EXPLAINED and _opposite(sample, tokens, line.slope):
            hits.append((value, tokens))
            lines.append(line)
            p_worst = max(p_worst, p)
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
        share=excess_share(sample, tokens) * len(tokens) / len(free),
    )


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
    it does not move the mean. Two conditions: z of E[rho] - 1, clustered by prompt, below -3.5; and 1 - E[rho] at least half of the noise's own KL (mean log^2 rho / 2), because a sample mean of very
    skewed ratios falls short of 1 by a fraction of that without any cut.
    """
    tokens = np.flatnonzero(sample.known_N & ~sample.claimed_N)
    if len(tokens) < 100:
        return None
    log_rho = np.clip(sample.log_rho_N[tokens], -20, 20)
    rho, unit = np.exp(log_rho), sample.cluster_N[tokens]
    z = clustered_z(np.bincount(unit, rho - 1), np.bincount(unit).astype(float))
    lost = 1 - float(rho.mean())
    noise = float(np.mean(log_rho**2)) / 2
    if not z < -3.5 or lost < 0.5 * noise:
        return None
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
        share=min(1.0, explained),
    )
