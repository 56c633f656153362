"""Intervals and paired tests. Pure functions of NumPy arrays; scores lie in [0, 1], one per problem (suffix _I).

Problems are the unit everywhere: the K answers to one problem depend on each other, so resampling and sign flips act on
whole problems. Random draws have a fixed seed: the same results give the same report.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

DRAWS = 10_000
FEW = 10
"""With fewer problems than this that differ, the bootstrap's interval is too narrow: see `bench/eval_power.py`."""

CONVOLVED = 20_000
"""Sums of signs up to this size are convolved, which keeps the smallest chances exact; longer ones would take minutes."""


class Interval(NamedTuple):
    low: float
    high: float
    method: str


def z_value(level: float) -> float:
    """Two-sided normal quantile: 1.96 for level .95."""
    return NormalDist().inv_cdf((1 + level) / 2)


def wilson(successes: float, count: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (1927); holds at 0 and `count` successes, where Wald's has no width."""
    if count < 1:
        raise ValueError(f"an interval needs at least one problem, got {count}")
    z, rate = z_value(level), successes / count
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    # Rounding would leave 1e-17 where the bound is exactly 0 or 1.
    low, high = (0.0 if successes == 0 else centre - half), (1.0 if successes == count else centre + half)
    return Interval(low, high, "wilson")


def mean_interval(score_I: np.ndarray, level: float = 0.95) -> Interval:
    """Of an accuracy: Wilson where every score is 0 or 1, otherwise the bootstrap over problems."""
    if np.isin(score_I, (0.0, 1.0)).all():
        return wilson(float(score_I.sum()), len(score_I), level)
    return bootstrap(score_I, level)


def bootstrap(value_I: np.ndarray, level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Percentile interval of the mean, problems resampled with replacement (Efron 1979).

    How often each *distinct* value is drawn is multinomial, which is the same distribution at the cost of the few
    values that K answers allow instead of all problems.
    """
    values, counts = np.unique(value_I, return_counts=True)
    rng, size = np.random.default_rng(seed), len(value_I)
    chunk = max(1, 4_000_000 // len(values))
    parts = [min(chunk, draws - start) for start in range(0, draws, chunk)]
    means = np.concatenate([rng.multinomial(size, counts / size, part) @ values / size for part in parts])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), "bootstrap")


def difference_interval(difference_I: np.ndarray, level: float = 0.95) -> Interval:
    """Of the mean paired difference: the bootstrap over problems; where fewer than `FEW` problems differ, Tango's score
    interval. Differences smaller than 1 are counted there as whole ones; the wider bound of the two methods is taken."""
    if np.count_nonzero(difference_I) >= FEW:
        return bootstrap(difference_I, level)
    score = tango(int((difference_I > 0).sum()), int((difference_I < 0).sum()), len(difference_I), level)
    if np.isin(difference_I, (-1.0, 0.0, 1.0)).all():
        return score
    drawn = bootstrap(difference_I, level)
    return Interval(min(score.low, drawn.low), max(score.high, drawn.high), "score")


def tango(gained: int, lost: int, count: int, level: float = 0.95) -> Interval:
    """Score interval of the difference of paired proportions, (gained - lost) / count (Tango 1998).

    The differences d whose score statistic (gained - lost - n d) / sqrt(n (2 q + d - d^2)) lies within z, q being the
    maximum-likelihood rate of losses given d: the root of 2n q^2 + B q - lost d (1 - d) with
    B = (2n - gained + lost) d - gained - lost. It has width also where no problem differs.
    """
    z = z_value(level)

    def statistic(d: float) -> float:
        b = (2 * count - gained + lost) * d - gained - lost
        q = (math.sqrt(max(b * b + 8 * count * lost * d * (1 - d), 0.0)) - b) / (4 * count)
        variance = count * (2 * q + d - d * d)
        excess = gained - lost - count * d
        if variance <= 1e-12:
            return math.copysign(math.inf, excess) if abs(excess) > 1e-9 else 0.0
        return excess / math.sqrt(variance)

    def root(inside: float, outside: float, target: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(statistic(middle)) <= target:
                inside = middle
            else:
                outside = middle
        return inside

    centre = (gained - lost) / count
    return Interval(root(centre, -1.0, z), root(centre, 1.0, z), "score")


def pass_at_k(correct_I: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Unbiased chance that at least one of k answers is right: 1 - C(n - c, k) / C(n, k) with n samples, c right ones
    (Chen et al. 2021). [I] counts -> [I]; their mean is pass@k."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs between 1 and K={samples} answers a problem; sample more, or ask a smaller k")
    chance = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)]
    return np.array(chance)[np.asarray(correct_I, dtype=int)]


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p of McNemar's test: gained ~ Binomial(gained + lost, 1/2) where neither is better."""
    total = gained + lost
    if total == 0:
        return 1.0
    below = sum(math.comb(total, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * below / 2**total)


def sign_flip(difference_I: np.ndarray, samples: int = 1, draws: int = 100_000, seed: int = 0) -> float:
    """Two-sided p of the paired permutation test: were the two engines one, each problem's difference could as well have
    had the other sign. Statistic: the absolute sum of differences.

    Exact where differences are multiples of 1/samples (all scores 0 or 1): a sum of signs is a convolution of scaled
    binomials, one for each size of difference. With samples=1 it is McNemar's exact test. Otherwise by Monte Carlo,
    (hits + 1) / (draws + 1), never 0.
    """
    scaled_I = np.abs(difference_I) * samples
    whole_I = np.rint(scaled_I).astype(int)
    if np.abs(scaled_I - whole_I).max(initial=0) > 1e-6:
        return _sampled_sign_flip(difference_I, draws, seed)
    observed = abs(int(np.rint(difference_I * samples).sum()))
    law = _law_of_signs(np.bincount(whole_I))
    sums = np.arange(len(law)) - len(law) // 2
    return min(1.0, float(law[np.abs(sums) >= observed].sum()))


def _law_of_signs(count_S: np.ndarray) -> np.ndarray:
    """Law of a sum of randomly signed sizes, of which there are count_S[s] of size s: P(sum) from -reach to reach."""
    reach = int(count_S @ np.arange(len(count_S)))
    sizes = [(size, int(count)) for size, count in enumerate(count_S) if size and count]
    if reach > CONVOLVED:
        # By the characteristic function, the product of cos(size t)^count. Its rounding hides chances below 1e-15.
        points = 2 * reach + 1
        turn = 2 * np.pi * np.arange(reach + 1) / points
        transform = np.prod([np.cos(size * turn) ** count for size, count in sizes], axis=0)
        return np.fft.fftshift(np.fft.irfft(transform, points)).clip(1e-18)
    law = np.ones(1)
    for size, count in sizes:
        spread = np.zeros(2 * size * count + 1)
        spread[:: 2 * size] = binomial_law(count, 0.5)
        law = np.convolve(law, spread)
    return law


def _sampled_sign_flip(difference_I: np.ndarray, draws: int, seed: int) -> float:
    values = difference_I[difference_I != 0]
    rng, observed = np.random.default_rng(seed), abs(values.sum()) - 1e-9
    chunk = max(1, 4_000_000 // max(len(values), 1))
    hits = 0
    for start in range(0, draws, chunk):
        signs = rng.integers(0, 2, (min(chunk, draws - start), len(values)), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ values) >= observed).sum())
    return (hits + 1) / (draws + 1)


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down adjusted p (1979): the chance of any false alarm among all pairs stays at the level."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def binomial_law(count: int, chance: float) -> np.ndarray:
    """P(X = k), k = 0..count."""
    if chance in (0.0, 1.0):
        law = np.zeros(count + 1)
        law[count if chance else 0] = 1.0
        return law
    k = np.arange(count + 1)
    ways = log_factorials(count)
    return np.exp(ways[count] - ways - ways[::-1] + k * math.log(chance) + (count - k) * math.log1p(-chance))


_LOG_FACTORIALS = np.zeros(1)


def log_factorials(count: int) -> np.ndarray:
    """ln k!, k = 0..count; the table grows as it is asked."""
    global _LOG_FACTORIALS
    if len(_LOG_FACTORIALS) <= count:
        _LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, 2 * count + 1)))])
    return _LOG_FACTORIALS[: count + 1]
