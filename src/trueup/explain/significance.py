"""Tests and their corrections. Everything here is a few lines of normal theory; no SciPy is needed."""

from __future__ import annotations

import functools
import math

import numpy as np


def normal_tail(z: float) -> float:
    """P(Z > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def clustered_z(sum_B: np.ndarray, n_B: np.ndarray, null: float = 0.0) -> float:
    """z of the ratio of sums R = sum S / sum n against `null`, clustered by row of the arrays (Cochran 6.4)."""
    keep = n_B > 0
    s, n = sum_B[keep], n_B[keep]
    if len(s) < 2:
        return 0.0
    residual = s - n * (s.sum() / n.sum())
    error = math.sqrt(len(s) / (len(s) - 1) * float(residual @ residual)) / n.sum()
    mean = s.sum() / n.sum() - null
    return mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def clustered_test(sum_B: np.ndarray, n_B: np.ndarray, null: float = 0.0) -> float:
    """`clustered_z` as a normal would have it: with few clusters the error itself is uncertain (Student's t)."""
    return as_normal(clustered_z(sum_B, n_B, null), int((n_B > 0).sum()) - 1)


def as_normal(t: float, freedom: int) -> float:
    """Student's t with so many degrees of freedom -> the normal value of about the same tail (Wallace 1959)."""
    if freedom < 1:
        return 0.0
    if not math.isfinite(t):
        return t if freedom > 7 else 0.0
    size = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(size, t)


def binomial_tail(hits: int, count: int, chance: float) -> float:
    """P(X >= hits), an upper bound: Chernoff's, exact enough at the levels used here."""
    rate = hits / count
    if rate <= chance:
        return 1.0
    if chance <= 0:
        return 0.0
    kl = rate * math.log(rate / chance) + ((1 - rate) * math.log((1 - rate) / (1 - chance)) if rate < 1 else 0.0)
    return math.exp(-count * kl)


def robust_scale(values: np.ndarray) -> float:
    """1.4826 median |x|: the standard deviation of a normal centre, whatever the tails."""
    return 1.4826 * float(np.median(np.abs(values))) if len(values) else 0.0


def two_groups(values: np.ndarray, draws: int = 1000) -> tuple[float, np.ndarray, float]:
    """Is a sample two clusters rather than one? -> (p, mask of the upper cluster, distance of the two means).

    The split minimises the squares within (Otsu). The statistic is the share of variance between; its null distribution
    is that of normal samples of the same size, drawn with a fixed seed (parametric bootstrap).
    """
    if len(values) < 4 or np.ptp(values) == 0:
        return 1.0, np.zeros(len(values), bool), 0.0
    between, cut = _best_split(values[None, :])
    upper = values > cut[0]
    p = (1 + (_null_splits(min(len(values), 500), draws) >= between[0]).sum()) / (draws + 1)
    return p, upper, float(values[upper].mean() - values[~upper].mean())


@functools.lru_cache(maxsize=64)
def _null_splits(size: int, draws: int) -> np.ndarray:
    return _best_split(np.random.default_rng(0).standard_normal((draws, size)))[0]


def _best_split(values_DN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.sort(values_DN, axis=1)
    count = ordered.shape[1]
    left = np.cumsum(ordered, 1)[:, :-1]
    total = ordered.sum(1, keepdims=True)
    n = np.arange(1, count)
    mean = total / count
    between = n * (left / n - mean) ** 2 + (count - n) * ((total - left) / (count - n) - mean) ** 2
    best = between.argmax(1)
    rows = np.arange(len(ordered))
    spread = ((ordered - mean) ** 2).sum(1)
    return between[rows, best] / np.maximum(spread, 1e-300), ordered[rows, best]


def two_sided(z: float) -> float:
    return 2 * normal_tail(abs(z))
