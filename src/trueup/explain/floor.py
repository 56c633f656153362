"""The ordinary part of the gap: `precision` or `quantised`, and how large it normally is."""

from __future__ import annotations

import re

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.sample import Sample
from trueup.explain.significance import robust_scale
from trueup.explain.where import describe

NORMAL = {"precision": 0.25, "quantised": 1.0}
"""Largest ordinary scale of the log-odds gap (measured: .03 to .08 in bf16; .21 in int8 at 0.5B, .42 to .72 at 1M)."""
COPIED = 0.9
"""Two computations of informative tokens do not agree to the last bit more often than this, not even in one engine."""
TYPICAL = {"precision": 0.08, "quantised": 0.21}


def floor_name(engine: str, scale: float) -> str:
    """By the engine's name where it tells; a bf16 engine whose noise is beyond bf16's is quantised all the same."""
    if re.search(r"int8|int4|fp8|fp4|w8a8|w4a16|awq|gptq|nf4|mxfp", engine.lower()):
        return "quantised"
    bound = NORMAL["precision"] if engine else 0.15
    return "quantised" if scale > bound else "precision"


def floor(sample: Sample, named: list[Finding]) -> Finding:
    """The ordinary part: `precision` or `quantised`."""
    free = sample.free()
    scale = robust_scale(sample.gap_N[free])
    tilted = any(finding.cause not in ("missing", "placeholder", "observation") for finding in named)
    name = floor_name(sample.engine, TYPICAL["precision"] if tilted else scale)
    k3 = np.expm1(np.clip(sample.log_rho_N[free], -20, 20)) - sample.log_rho_N[free]
    size = (
        f"KL about {max(float(k3.mean()), 0.0):.1e} nats a token among informative ones"
        if len(free)
        else "nothing to compare"
    )
    remedy = (
        "Nothing to repair; correct it (correction=tis)."
        if name == "quantised"
        else "Nothing to repair; a truncated ratio (correction=tis) is cheap insurance."
    )
    where = describe(sample, np.arange(len(sample.lengths)))
    evidence = f"Fresh noise at every token, scale {scale:.2f} in log-odds, {size}."
    if len(free) and float(np.mean(sample.log_rho_N[free] == 0)) > COPIED:
        evidence = (
            "The two log-probs are the same to the last bit: one is a copy of the other and nothing was recomputed, "
            "so no fault can show here."
        )
        remedy = (
            "Recompute log pi_old with the learner (not bypass mode, nor the rollout's log-probs as old log-probs)."
        )
    if tilted:
        evidence = "What is left beside the causes above; its size cannot be told apart from them here."
    return Finding(name, 0.99, where, evidence, remedy, np.arange(len(sample.lengths)))


def excess_share(sample: Sample, tokens: np.ndarray, lowest: float = float("inf")) -> float:
    """Of the mean |gap| of these tokens, what lies above an ordinary floor, or above `lowest` where that is smaller."""
    ordinary = min(0.8 * TYPICAL[floor_name(sample.engine, 0.0)], lowest)
    mean = float(np.minimum(np.abs(sample.gap_N[tokens]), 4.0).mean()) if len(tokens) else 0.0
    return max(0.0, 1 - ordinary / mean) if mean > 0 else 0.0
