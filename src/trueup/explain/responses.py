"""The size of the gap, response by response and step by step: two kinds of responses, and how it changes over steps."""

from __future__ import annotations

import math

import numpy as np

from trueup.explain.sample import Sample
from trueup.explain.significance import two_groups

TOKENS_A_ROW = 8
APART = math.log(1.6)
"""Least distance of two kinds of responses, in the log of their mean |gap|."""


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


def two_kinds(rows: Rows) -> tuple[np.ndarray, str, float] | None:
    """Two kinds of responses within steps -> (mask of the upper kind, `group` or `row`, distance in logs).

    The split must beat a normal sample's best split (parametric bootstrap, 0.5% by prompt, 0.2% by response), and the
    means must lie apart by APART and by four times what the finite length of responses makes of one scale. A kind
    has more than a few members.
    """
    noise = math.sqrt(float(np.mean(rows.error**2)))
    # Group numbers may begin anew at every step: a prompt of a step is the unit.
    groups, at = np.unique(np.stack([rows.step, rows.group]), axis=1, return_inverse=True)
    groups, at = groups.T, at.reshape(-1)
    counts = np.bincount(at)
    if len(groups) >= 4 and np.median(counts) >= 2:
        mean = np.bincount(at, rows.centred) / counts
        p, upper, distance = two_groups(mean)
        within = math.sqrt(float(np.mean((rows.centred - mean[at]) ** 2)) * 2)
        far = distance > max(APART, 4 * noise / math.sqrt(2)) and within < distance / 2
        if p < 0.005 and far and _several(upper, 3):
            return upper[at], "group", distance
    p, upper, distance = two_groups(rows.centred)
    if p < 0.002 and distance > max(APART, 4 * noise) and _several(upper, 4):
        return upper, "row", distance
    return None


def _several(upper: np.ndarray, least: int) -> bool:
    """Whether both kinds have `least` members and a tenth of all: fewer are outliers, often very short responses."""
    return min(upper.sum(), (~upper).sum()) >= max(least, len(upper) / 10)


def growth(rows: Rows) -> tuple[int, float, int | None] | None:
    """The scale rises over steps -> (first step, ratio of last to first, steps until it stayed level or None).

    From the first third to the last it must rise by half at least and by more than 4 standard errors. It stays level when
    of the rise that a gap in proportion to the steps would show from the third quarter to the last, less than a third
    is there, by 3 standard errors.
    """
    if len(rows.steps) < 2 or len(rows.rows) < 8:
        return None
    third = max(1, len(rows.steps) // 3)
    early, late = rows.by_step[:third], rows.by_step[-third:]
    rise = late.mean() - early.mean()
    error = math.sqrt((rows.step_error[:third] ** 2).sum() + (rows.step_error[-third:] ** 2).sum()) / third
    if rise < math.log(1.5) or (error > 0 and rise < 4 * error):
        return None
    return int(rows.steps[0]), math.exp(rise), _knee(rows)


def _knee(rows: Rows) -> int | None:
    count = len(rows.steps)
    if count < 6:
        return None
    quarter = count // 4 or 1
    before, last = slice(count - 2 * quarter, count - quarter), slice(count - quarter, count)
    rise = float(rows.by_step[last].mean() - rows.by_step[before].mean())
    error = math.sqrt(float((rows.step_error[last] ** 2).sum() + (rows.step_error[before] ** 2).sum())) / quarter
    at = np.arange(count) + 1.0
    expected = math.log(at[last].mean() / at[before].mean())
    if rise + 3 * error > expected or rise > expected / 3:
        return None
    level = float(rows.by_step[-2 * quarter :].mean())
    return int(np.flatnonzero(rows.by_step >= level - max(0.1, 2 * error))[0])
