"""What a paired comparison can see: power, the smallest difference it would find, the problems it would need.

A study of n problems is described by its *discordance*, the mean squared difference: for one right-or-wrong answer a
problem that is the share of problems on which the two disagree. Differences are absolute, in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from trueup.evaluate.statistics import binomial_law, log_factorials, z_value

POWER = 0.8
EXACT = 1000
"""Exact up to this many expected discordant problems; beyond it the normal approximation is as good (0.2 points)."""


def power(count: int, discordance: float, difference: float, alpha: float = 0.05, samples: int = 1) -> float:
    """Chance that the test of `statistics.sign_flip` says p <= alpha when this difference is true.

    A difference above the discordance raises it: problems that differ are then all on one side.
    """
    if samples > 1:
        return _normal_power(count, max(discordance, difference**2), difference, alpha, 1 / samples)
    discordance = max(discordance, difference)
    if count * discordance > EXACT:
        return _normal_power(count, discordance, difference, alpha, 1.0)
    return _mcnemar_power(count, discordance, difference, alpha)


def minimum_detectable(count: int, discordance: float, alpha: float = 0.05, samples: int = 1) -> float | None:
    """The smallest true difference that is found with power .8; None: not even a difference on every problem."""
    if discordance == 0:
        samples = 1  # nothing is known of the sizes of differences: problems that flip altogether are assumed
    if power(count, discordance, 1.0, alpha, samples) < POWER:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        if power(count, discordance, middle, alpha, samples) < POWER:
            low = middle
        else:
            high = middle
    return high


def items_needed(discordance: float, difference: float, alpha: float = 0.05, samples: int = 1) -> int | None:
    """Problems needed to find this difference with power .8 at this discordance; None for no difference at all."""
    difference = abs(difference)
    if difference == 0:
        return None
    reached: Callable[[int], bool] = lambda count: power(count, discordance, difference, alpha, samples) >= POWER  # noqa: E731
    high = _normal_items(max(discordance, difference**2), difference, alpha, 1 / samples)
    while not reached(high):
        high = math.ceil(high * 1.1)
    low = high
    while low > 1 and reached(low):
        low = int(low / 1.1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _mcnemar_power(count: int, discordance: float, difference: float, alpha: float) -> float:
    """Exact and unconditional: the discordant problems are Binomial(n, discordance), the gained among them
    Binomial(m, (1 + difference / discordance) / 2), and the exact test of every m has its own critical value."""
    if discordance == 0:
        return 0.0
    law = binomial_law(count, min(discordance, 1.0))
    gain = (1 + difference / discordance) / 2
    return sum(law[m] * _rejected(m, gain, alpha) for m in np.flatnonzero(law > 1e-10).tolist())


def _rejected(total: int, gain: float, alpha: float) -> float:
    critical = _critical(total, alpha)
    if critical < 0:
        return 0.0
    if gain >= 1:
        return 1.0
    k = np.concatenate([np.arange(critical + 1), np.arange(total - critical, total + 1)])
    ways = log_factorials(total)
    terms = ways[total] - ways[k] - ways[total - k] + k * math.log(gain) + (total - k) * math.log1p(-gain)
    return float(np.exp(terms).sum())


@lru_cache(maxsize=100_000)
def _critical(total: int, alpha: float) -> int:
    """Largest k for which k against total - k has an exact two-sided p <= alpha; -1: none."""
    tail = 2 * np.cumsum(binomial_law(total, 0.5)[: (total + 1) // 2])
    return int(np.searchsorted(tail, alpha * (1 + 1e-9), side="right")) - 1


def _normal_power(count: int, discordance: float, difference: float, alpha: float, step: float) -> float:
    """The sum of differences has the null variance n discordance and the variance n (discordance - difference^2)
    otherwise (Connor 1987); `step` is half the distance of its possible values."""
    spread = math.sqrt(max(count * (discordance - difference**2), 1e-12))
    bound = z_value(1 - alpha) * math.sqrt(count * discordance) + step
    normal = NormalDist()
    return normal.cdf((count * difference - bound) / spread) + normal.cdf((-count * difference - bound) / spread)


def _normal_items(discordance: float, difference: float, alpha: float, step: float) -> int:
    """n difference - step = sqrt(n) A, solved for n."""
    power_z = NormalDist().inv_cdf(POWER)
    a = z_value(1 - alpha) * math.sqrt(discordance) + power_z * math.sqrt(max(discordance - difference**2, 0.0))
    return math.ceil(((a + math.sqrt(a * a + 4 * difference * step)) / (2 * difference)) ** 2)
