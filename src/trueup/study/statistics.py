"""The statistics of few seeds: intervals, paired tests, what could have been seen, bootstrap bands. Arrays in, numbers out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EXACT_FLIPS = 16
"""Up to this many pairs all 2^n sign patterns are tried; beyond, 65,536 of them, drawn with a fixed seed."""
BOOTSTRAPS = 4096
"""Resamples of a band; up to this many possible ones (5 seeds have 3,125) all are taken instead, exactly."""


@dataclass(frozen=True)
class Paired:
    """A minus B on common seeds."""

    n: int
    mean: float
    low: float | None
    """95% Student interval of the mean; None with fewer than two pairs."""
    high: float | None
    sd: float | None
    p_t: float | None
    """Two-sided paired t test; None where it is not defined: one pair, or differences all alike and not zero."""
    p_flip: float
    """Two-sided exact sign-flip permutation test."""
    p_flip_least: float
    """The smallest p that this many pairs allow it: 2 / 2^n."""


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """a, b: one value a seed, in the same order. Raises ValueError if their lengths differ or are 0."""
    if len(a) != len(b) or not len(a):
        raise ValueError(f"paired tests need as many values on either side, at least one: got {len(a)} and {len(b)}")
    difference = np.asarray(a, float) - np.asarray(b, float)
    n, mean = len(difference), float(difference.mean())
    sd = float(difference.std(ddof=1)) if n > 1 else None
    _, low, high = interval(difference)
    if sd is None:
        p = None
    elif sd <= 1e-12 * max(1.0, abs(mean)):
        p = 1.0 if abs(mean) < 1e-12 else None
    else:
        p = t_two_sided(mean / (sd / math.sqrt(n)), n - 1)
    return Paired(n, mean, low, high, sd, p, sign_flip(difference), 2 / 2**n)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None, float | None]:
    """Mean and its two-sided Student interval; no interval from one value."""
    values = np.asarray(values, float)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return mean, None, None
    half = t_quantile((1 + level) / 2, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def t_two_sided(t: float, df: int) -> float:
    """P(|T| >= |t|) for a whole number of degrees of freedom (the finite series, Abramowitz and Stegun 26.7.3 and 4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    term = cosine if df % 2 else 1.0
    total = 0.0
    for power in range(1 if df % 2 else 0, df - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = 2 / math.pi * (theta + sine * total) if df % 2 else sine * total
    return min(1.0, max(0.0, 1 - inside))


def t_quantile(probability: float, df: int) -> float:
    """The value that Student's T stays below with this probability, 0.5 or more; by bisection over the angle."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if 1 - t_two_sided(math.tan(middle) * math.sqrt(df), df) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(df)


def sign_flip(difference: Sequence[float]) -> float:
    """Two-sided permutation test that the differences are symmetric about zero: the share of sign patterns whose mean is
    at least as far from zero as the one seen. Exact up to EXACT_FLIPS pairs."""
    difference = np.asarray(difference, float)
    n = len(difference)
    if n <= EXACT_FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    else:
        drawn = np.random.default_rng(0).integers(0, 2, (2**16, n)) * 2.0 - 1
        signs = np.vstack([np.ones(n), drawn])
    sums = np.abs(signs @ difference)
    return float((sums >= sums[0] * (1 - 1e-9) - 1e-12).mean())


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment of a family of p values; None (no test) stays None and does not count."""
    order = sorted((p, at) for at, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, at) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[at] = highest
    return adjusted


def detectable(sd: float | None, n: int, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """The true difference that a paired t test of n seeds finds with this power, if differences scatter by `sd`:
    (t[1 - alpha/2] + t[power]) sd / sqrt(n), the usual approximation by central t. None with fewer than two pairs, and where
    all differences are alike: a scatter of zero says that the measure is coarse, not that it sees everything."""
    if sd is None or n < 2 or sd <= 1e-12:
        return None
    return (t_quantile(1 - alpha / 2, n - 1) + t_quantile(power, n - 1)) * sd / math.sqrt(n)


def bootstrap_band(values_ST: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Percentile band [T] of the mean over S seeds at each of T steps, seeds resampled whole. Needs S of 2 or more."""
    seeds = len(values_ST)
    if seeds**seeds <= BOOTSTRAPS:
        drawn = np.array(list(itertools.product(range(seeds), repeat=seeds)))
    else:
        drawn = np.random.default_rng(0).integers(0, seeds, (BOOTSTRAPS, seeds))
    means = values_ST[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Area under the curve by trapezoids, over its width: the mean height between the first point and the last."""
    width = steps[-1] - steps[0]
    pieces = zip(steps, steps[1:], values, values[1:])
    return (
        sum((after - before) * (left + right) / 2 for before, after, left, right in pieces) / width
        if width
        else values[-1]
    )
