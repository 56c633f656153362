"""Causes in which the two sides compute other logits: weights, cache, prompt, and unknown."""

from __future__ import annotations

import math

import numpy as np

from trueup.explain.distribution import residual_gap
from trueup.explain.finding import Finding
from trueup.explain.floor import NORMAL, excess_share, floor_name
from trueup.explain.responses import Rows, growth, two_kinds
from trueup.explain.sample import Sample
from trueup.explain.shape import chance_of_prompt, describe_shape, favoured
from trueup.explain.significance import clustered_test, normal_tail, robust_scale
from trueup.explain.where import describe

WHITE = {"precision": 0.04, "quantised": 0.07}
"""Correlation of the gap with the next tokens that noise stays below (measured: .00 to .03 in bf16, .04 to .06 in int8)."""
RAISED = {"precision": (0.15, 0.005), "quantised": (1.0, 0.012)}
"""Scale, and KL in nats a token, above either of which a correlation beyond WHITE needs no z. Healthy rollouts showed .04
to .11 and .0005 in bf16; .2 to .7 and, in 97 of 100 dumps, .008 in int8."""
EXCESS_KL = {"precision": 0.01, "quantised": 0.04}
"""KL that no noise explains, white or not."""
FAVOURED = 0.05
"""Correlation of equal token ids across prompts that kernels stay below (measured: -.03 to .02 in bf16)."""
BEYOND_NOISE = 1.2
"""Fresh noise of this scale comes from no kernel or 8-bit quantisation that was measured (up to .72)."""


def other_logits(sample: Sample) -> Finding | None:
    """`weights`, `cache` or `prompt`: is the gap more than noise, and where does it sit?

    Rounding errors of two kernels, or of int8, are fresh at every token: the signed gap is uncorrelated along a response.
    Other weights, keys of older weights or another prompt shift whole stretches of text in the same direction: the
    correlation with the next three tokens exceeds WHITE. That, a scale beyond the ordinary, a scale that grows over steps, or
    two kinds of responses within a step say that something is wrong; which of them holds says what.
    """
    free = sample.free()
    if len(free) < 100:
        return None
    residual_N = residual_gap(sample, free)
    scale = robust_scale(residual_N[free])
    floor = floor_name(sample.engine, 0.0 if sample.engine else 1.0)
    white = WHITE[floor]
    correlation, z = lean(sample, free, residual_N, scale, white)
    rows = Rows(sample, free)
    if len(rows.rows) < 4:
        return None
    kl = divergence(sample)
    raised = scale > RAISED[floor][0] or kl > RAISED[floor][1]
    excess = scale > NORMAL[floor] or kl > EXCESS_KL[floor]
    # Beyond the usual scale the question is no longer whether, only which kind.
    systematic = correlation > white and (z > 3.5 or raised)
    if floor == "precision" and sample.engine and not systematic:
        # Kernels favour no token id; int8 does, as other weights do, so there this says nothing.
        alike, z_alike = favoured(sample, free, residual_N, scale)
        systematic, z = alike > FAVOURED and z_alike > 3.5, max(z, min(z_alike, 8.0))
    kinds, rise = two_kinds(rows), growth(rows)
    p = min(normal_tail(z), 1e-3) if systematic else 1e-4
    if kinds is not None and (systematic or excess or kinds[2] > math.log(2)):
        upper, kind, distance = kinds
        # Two kinds of prompts differ in their noise too: the upper kind must show more than noise, the lower no more.
        noise = [_ordinary(sample, rows.rows[kind_B], free, floor) for kind_B in (upper, ~upper)]
        if noise == [False, True]:
            return _part(sample, rows, upper, kind, distance, p, floor)
    if not (systematic or excess or rise):
        return None
    lowest = math.exp(float(rows.by_step.min())) if len(rows.steps) > 1 else math.inf
    share = excess_share(sample, free, lowest) * sample.mass_of(np.arange(len(sample.lengths)))
    every = rows.rows
    measured = (
        f"mean |log-odds gap| {math.exp(float(np.mean(rows.scale))):.2f}, KL {kl:.1e} nats a token, correlation with the "
        f"next tokens {correlation:.2f}"
    )
    if rise is not None:
        return _growing(sample, rows, rise, measured, p, share)
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
    prompt = chance_of_prompt(describe_shape(sample, free, residual_N, scale), sample.ids_N is not None)
    if prompt > 0.5:
        return Finding(
            "prompt",
            min(prompt, 1 - 12 * p),
            describe(sample, every),
            f"The gap is systematic ({measured}), in all groups, and made as by another context for the same weights: it "
            f"fades along the response, and the token ids it favours differ from prompt to prompt{_or(prompt, 'weights')}.",
            "Compare the learner's input ids with the engine's prompt ids: chat template, system message, BOS.",
            every,
            share,
        )
    return Finding(
        "weights",
        min(1 - prompt, 1 - 12 * p),
        describe(sample, every),
        f"The gap is systematic ({measured}), in all responses and positions"
        + (", the same at every step" if len(rows.steps) > 1 else "")
        + ": part of the weights (layers, an adapter) did not arrive, or the sampler is a fixed number of versions behind"
        + _stamped(rows)
        + f"{_or(1 - prompt, 'prompt')}.",
        "Check which parameters the engine received (names, shards, adapter) and reset its caches; compare a canary batch.",
        every,
        share,
    )


def _or(chance: float, other: str) -> str:
    """Names the runner-up where the choice is not sure."""
    return "" if chance > 0.9 else f"; {other} would look much the same ({1 - chance:.0%})"


def _stamped(rows: Rows) -> str:
    lag = rows.lag[np.isfinite(rows.lag)]
    return f" (the stamped versions say up to {int(lag.max())})" if len(lag) and lag.max() > 0 else ""


def _growing(sample: Sample, rows: Rows, rise: tuple, measured: str, p: float, share: float) -> Finding:
    first, ratio, knee = rise
    hit = rows.rows[rows.step > first]
    if knee is None:
        story = "the sampler stays behind while the learner moves on; updates were never delivered"
        remedy = (
            "Check that the trained weights (adapter included) reach the engine at every sync; compare a canary batch."
        )
    else:
        level = int(rows.steps[knee])
        story = f"it stays level from step {level} on, as with a sampler that is always about {max(knee, 1)} versions behind"
        remedy = (
            "If that staleness is wanted (asynchronous rollouts), correct for it; otherwise sync before every rollout."
        )
    return Finding(
        "weights",
        1 - 12 * p,
        describe(sample, hit),
        f"The gap grows over steps, to {ratio:.1f} times that of step {first}, and is systematic ({measured}): "
        f"{story}{_stamped(rows)}.",
        remedy,
        hit,
        share,
    )


def _ordinary(sample: Sample, rows: np.ndarray, free: np.ndarray, floor: str) -> bool:
    """Whether these responses show noise only: their gap is of ordinary size and white."""
    tokens = free[np.isin(sample.row_N[free], rows)]
    if len(tokens) < 50:
        return True
    residual_N = residual_gap(sample, tokens)
    scale = robust_scale(residual_N[tokens])
    correlation, z = lean(sample, tokens, residual_N, scale, WHITE[floor])
    raised = scale > RAISED[floor][0] or divergence(sample, rows) > RAISED[floor][1]
    return not raised and (correlation < 1.5 * WHITE[floor] or z < 2)


def divergence(sample: Sample, rows: np.ndarray | None = None) -> float:
    """KL(sampler, learner), nats a token: mean of -log rho over unclaimed tokens, of some responses or of all."""
    kept_N = sample.known_N & ~sample.claimed_N
    if rows is not None:
        kept_N &= np.isin(sample.row_N, rows)
    return -float(np.clip(sample.log_rho_N[kept_N], -20, 20).mean()) if kept_N.any() else 0.0


def lean(sample: Sample, free: np.ndarray, residual_N: np.ndarray, scale: float, white: float) -> tuple[float, float]:
    """Correlation of the residual gap, bounded at twice its scale, with that of the next three tokens of the response.

    -> (correlation, z against `white`, clustered by prompt). The bound keeps few overturned tokens from being all of it.
    """
    if len(free) < 50 or scale == 0:
        return 0.0, 0.0
    bounded_N = np.clip(residual_N, -2 * scale, 2 * scale)
    is_free_N = np.zeros(len(residual_N), bool)
    is_free_N[free] = True
    units = int(sample.cluster_N.max()) + 1
    product_U, square_U = np.zeros(units), np.zeros(units)
    for lag in (1, 2, 3):
        at = free[free + lag < len(residual_N)]
        at = at[is_free_N[at + lag] & (sample.row_N[at + lag] == sample.row_N[at])]
        unit, here, there = sample.cluster_N[at], bounded_N[at], bounded_N[at + lag]
        product_U += np.bincount(unit, here * there, units)
        square_U += np.bincount(unit, (here**2 + there**2) / 2, units)
    return float(product_U.sum() / max(square_U.sum(), 1e-300)), clustered_test(product_U, square_U, white)


def _part(sample: Sample, rows: Rows, upper: np.ndarray, kind: str, distance: float, p: float, floor: str) -> Finding:
    hit = rows.rows[upper]
    size = np.exp(rows.scale)
    share = max(0.0, float((size[upper] - np.exp(np.mean(rows.scale[~upper]))).sum() / size.sum()))
    share *= sample.mass_of(np.arange(len(sample.lengths)))
    sizes = f"{math.exp(distance):.1f} times that of the others of the same step"
    if kind == "group":
        return Finding(
            "cache",
            max(0.9, 1 - 12 * p) if floor == "precision" else 0.75,
            describe(sample, hit),
            f"Some prompts' responses have a gap {sizes}, which show noise only; all samples of a prompt alike: what they "
            "share, the prompt's cached prefix, was computed under other weights. Another prompt for these alone would "
            "look the same.",
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


def unbalanced(sample: Sample) -> Finding | None:
    """`unknown`: E[rho] differs from 1, which no noise explains, and no cause was found for it."""
    tokens = np.flatnonzero(sample.known_N & ~sample.claimed_N)
    if len(tokens) < 100:
        return None
    log_rho = np.clip(sample.log_rho_N[tokens], -20, 20)
    unit, rho = sample.cluster_N[tokens], np.exp(log_rho)
    z = clustered_test(np.bincount(unit, rho - 1), np.bincount(unit).astype(float))
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
        share=min(1.0, abs(float(rho.mean()) - 1) / max(float(np.abs(log_rho).mean()), 1e-12)) * sample.mass_of(rows),
    )
