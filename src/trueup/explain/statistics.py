"""Statistics of a dump in one pass: sums by response, so that every interval is clustered by response.

For a mean over tokens R = sum_i S_i / sum_i n_i over responses i, the linearised variance is
B/(B-1) sum_i (S_i - R n_i)^2 / (sum_i n_i)^2 (Cochran, "Sampling Techniques", 6.4). Expanded, it needs only the sums of
S, n, S^2, S n and n^2 over responses, which is all that is kept: memory does not depend on the size of the dump.
"""

from __future__ import annotations

import math

import numpy as np

from trueup.explain.dump import Batch

POSITION_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 1 << 40)
PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
STEPS_KEPT = 8192
"""Steps told apart; a longer run is reported in pairs of steps, then in fours, and so on."""
_BINS_AN_OCTAVE_LOG2 = 4
_SHIFT = 23 - _BINS_AN_OCTAVE_LOG2
"""The upper bits of a positive float32 are its logarithm, in steps of a sixteenth of an octave: bins of at most 6%."""


class ClusteredMean:
    """Means of several quantities in several bins, each with a 95% interval clustered by response."""

    def __init__(self, bins: int, quantities: int):
        self.n, self.nn, self.responses = np.zeros(bins), np.zeros(bins), np.zeros(bins)
        self.s, self.ss, self.sn = (np.zeros((quantities, bins)) for _ in range(3))

    def add(self, bin_C: np.ndarray, n_C: np.ndarray, sums: list[np.ndarray]) -> None:
        """One entry a (response, bin) cell: its bin, its tokens and its sum of each quantity."""
        count = len(self.n)
        self.n += np.bincount(bin_C, n_C, count)
        self.nn += np.bincount(bin_C, n_C * n_C, count)
        self.responses += np.bincount(bin_C, minlength=count)
        for k, sum_C in enumerate(sums):
            self.s[k] += np.bincount(bin_C, sum_C, count)
            self.ss[k] += np.bincount(bin_C, sum_C * sum_C, count)
            self.sn[k] += np.bincount(bin_C, sum_C * n_C, count)

    def merge(self, other: ClusteredMean) -> None:
        for name in ("n", "nn", "responses", "s", "ss", "sn"):
            getattr(self, name).__iadd__(getattr(other, name))

    def only(self, i: int) -> ClusteredMean:
        """One of the bins."""
        part = ClusteredMean(1, len(self.s))
        for name in ("n", "nn", "responses", "s", "ss", "sn"):
            setattr(part, name, getattr(self, name)[..., i : i + 1])
        return part

    def mean(self, k: int, i: int = 0) -> tuple[float, float]:
        """Mean and standard error (NaN below two responses)."""
        n, b = self.n[i], self.responses[i]
        if n == 0:
            return math.nan, math.nan
        mean = self.s[k, i] / n
        if b < 2:
            return mean, math.nan
        square = self.ss[k, i] - 2 * mean * self.sn[k, i] + mean * mean * self.nn[i]
        return mean, math.sqrt(max(square, 0.0) * b / (b - 1)) / n

    def interval(self, k: int, i: int = 0) -> dict[str, float]:
        mean, error = self.mean(k, i)
        return {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


class Statistics:
    """Everything `stats` reports, over tokens in the loss whose two log-probs are known."""

    QUANTITIES = ("k3", "k1", "log_rho_abs", "rho", "prob_diff")

    def __init__(self):
        self.rows = self.tokens = self.missing = self.unequal_rows = self.impossible = self.identical = 0
        self.all = ClusteredMean(1, 5)
        self.position = ClusteredMean(len(POSITION_EDGES) - 1, 5)
        self.length = ClusteredMean(len(POSITION_EDGES) - 1, 5)
        self.probability = ClusteredMean(len(PROBABILITY_EDGES) - 1, 5)
        self.steps: dict[int, ClusteredMean] = {}
        self.step_width = 1
        self.histogram = np.zeros(1 << (31 - _SHIFT), np.int64)
        self.prob_diff_max = self.log_rho_max = 0.0
        self._rho_squares = 0.0
        self._response_weights = _LogSums()

    def add(self, batch: Batch, known_N: np.ndarray, sampler_N: np.ndarray, learner_N: np.ndarray, row_N: np.ndarray):
        """`known_N` picks the measured tokens of the batch; the other vectors hold only those."""
        lengths_B = batch.lengths
        self.rows += len(lengths_B)
        self.unequal_rows += int(batch.unequal_B.sum())
        self.tokens += len(sampler_N)
        self.missing += int(batch.mask_N.sum()) - len(sampler_N)
        if len(sampler_N) == 0:
            return
        # float64: rho - 1 - log rho loses all its digits near agreement in float32.
        log_rho_N = learner_N.astype(np.float64)
        log_rho_N -= sampler_N
        size_N = np.abs(log_rho_N)
        self.log_rho_max = max(self.log_rho_max, float(size_N.max()))
        clipped_N = np.clip(log_rho_N, -300.0, 80.0) if self.log_rho_max > 80 else log_rho_N
        rho_N = np.exp(clipped_N)
        k3_N = rho_N - 1
        k3_N -= clipped_N
        if sampler_N.max() > 0 or learner_N.max() > 0:
            self.impossible += int((sampler_N > 0).sum() + (learner_N > 0).sum())
            sampler_N, learner_N = np.minimum(sampler_N, 0.0), np.minimum(learner_N, 0.0)
        mu_N = np.exp(sampler_N)
        diff_N = np.exp(learner_N)
        diff_N -= mu_N
        np.abs(diff_N, out=diff_N)
        self.prob_diff_max = max(self.prob_diff_max, float(diff_N.max()))
        self.identical += len(size_N) - int(np.count_nonzero(size_N))
        self._rho_squares += float(np.dot(rho_N, rho_N))
        self.histogram += np.bincount(size_N.astype(np.float32).view(np.int32) >> _SHIFT, minlength=len(self.histogram))

        row_C, bin_C, start_C, n_C = _position_cells(batch.offsets, known_N, len(sampler_N))
        sums_C = [np.add.reduceat(x, start_C, dtype=np.float64) for x in (k3_N, log_rho_N, size_N, rho_N, diff_N)]
        np.negative(sums_C[1], out=sums_C[1])  # k1 is -log rho
        self.position.add(bin_C, n_C, sums_C)
        self._add_rows(batch, row_C, n_C, sums_C)
        cell_N = row_N * (len(PROBABILITY_EDGES) - 1)
        cell_N += _probability_bin(mu_N)
        self._add_probability(cell_N, k3_N, size_N)

    def _add_rows(self, batch: Batch, row_C: np.ndarray, n_C: np.ndarray, sums_C: list[np.ndarray]) -> None:
        """What is kept of whole responses, from their cells."""
        first = np.flatnonzero(np.append(True, row_C[1:] != row_C[:-1]))
        rows, n_B = row_C[first], np.add.reduceat(n_C, first)
        sums = [np.add.reduceat(sum_C, first) for sum_C in sums_C]
        self.all.add(np.zeros(len(rows), np.int64), n_B, sums)
        self.length.add(np.digitize(batch.lengths[rows], POSITION_EDGES) - 1, n_B, sums)
        self._response_weights.add(-sums[1])
        step_B = batch.columns["step"][rows].astype(np.int64) // self.step_width * self.step_width
        steps, at_B = np.unique(step_B, return_inverse=True)
        together = ClusteredMean(len(steps), 5)
        together.add(at_B, n_B, sums)
        for i, step in enumerate(steps.tolist()):
            self.steps.setdefault(step, ClusteredMean(1, 5)).merge(together.only(i))
        while len(self.steps) > STEPS_KEPT:
            self._widen()

    def _widen(self) -> None:
        self.step_width *= 2
        merged: dict[int, ClusteredMean] = {}
        for step, at in self.steps.items():
            merged.setdefault(step // self.step_width * self.step_width, ClusteredMean(1, 5)).merge(at)
        self.steps = merged

    def _add_probability(self, cell_N: np.ndarray, k3_N: np.ndarray, size_N: np.ndarray) -> None:
        bins = len(PROBABILITY_EDGES) - 1
        n_C = np.bincount(cell_N)
        filled = np.flatnonzero(n_C)
        # The two that are read by bin; the other quantities would only cost time.
        k3_C, size_C = (np.bincount(cell_N, values)[filled] for values in (k3_N, size_N))
        zero = np.zeros(len(filled))
        self.probability.add(filled % bins, n_C[filled].astype(float), [k3_C, zero, size_C, zero, zero])

    def quantile(self, q: float) -> float:
        """Of |log rho|, to the width of a histogram bin (6%)."""
        cumulative = np.cumsum(self.histogram)
        if cumulative[-1] == 0:
            return math.nan
        i = int(np.searchsorted(cumulative, q * cumulative[-1]))
        return float(np.array((i + 1) << _SHIFT, np.int32).view(np.float32)) if i else 0.0

    def _ess_token(self) -> float:
        return self.all.s[3, 0] ** 2 / (self.tokens * self._rho_squares) if self.tokens else 1.0

    def as_dict(self) -> dict:
        intervals = {name: self.all.interval(k) for k, name in enumerate(self.QUANTITIES)}
        scored = self.tokens + self.missing
        numbers = {
            "rows": self.rows,
            "tokens": self.tokens,
            "missing_fraction": self.missing / scored if scored else 0.0,
            "rows_with_unequal_lengths": self.unequal_rows,
            "impossible_logprobs": self.impossible,
            "identical_fraction": self.identical / self.tokens if self.tokens else 0.0,
            "kl_k3": intervals["k3"],
            "kl_k1": intervals["k1"],
            "log_rho_abs": intervals["log_rho_abs"],
            "log_rho_abs_q50": self.quantile(0.5),
            "log_rho_abs_q99": self.quantile(0.99),
            "log_rho_abs_max": self.log_rho_max,
            "rho": intervals["rho"],
            "prob_diff": intervals["prob_diff"],
            "prob_diff_max": self.prob_diff_max,
            "ess_token": self._ess_token(),
            "ess_sequence": self._response_weights.ess(),
            "by_step": [{"step": s, **self._bin(at, 0)} for s, at in sorted(self.steps.items())],
            "by_position": self._table(self.position, POSITION_EDGES),
            "by_length": self._table(self.length, POSITION_EDGES),
            "by_probability": self._table(self.probability, PROBABILITY_EDGES),
        }
        return _finite(numbers)

    def _bin(self, at: ClusteredMean, i: int) -> dict:
        return {"tokens": int(at.n[i]), "kl_k3": at.interval(0, i), "log_rho_abs": at.interval(2, i)}

    def _table(self, at: ClusteredMean, edges) -> list[dict]:
        return [{"from": edges[i], "below": edges[i + 1], **self._bin(at, i)} for i in range(len(at.n)) if at.n[i]]


class _LogSums:
    """(sum w)^2 / (n sum w^2) for log-weights, kept relative to the largest so far: products of many rho overflow."""

    def __init__(self):
        self.top, self.sum, self.square, self.count = -math.inf, 0.0, 0.0, 0

    def add(self, log_w: np.ndarray) -> None:
        top = max(self.top, float(log_w.max()))
        scale = math.exp(self.top - top) if self.top > -math.inf else 0.0
        w = np.exp(log_w - top)
        self.sum = self.sum * scale + float(w.sum())
        self.square = self.square * scale**2 + float(np.dot(w, w))
        self.top, self.count = top, self.count + len(log_w)

    def ess(self) -> float:
        return self.sum**2 / (self.count * self.square) if self.count else 1.0


_BIN_OF_PERMILLE = np.digitize((np.arange(10001) + 0.5) / 10000, PROBABILITY_EDGES).astype(np.int8) - 1
_BIN_OF_PERMILLE[-1] = len(PROBABILITY_EDGES) - 2
_EDGES = np.array(POSITION_EDGES[:-1])


def _probability_bin(mu_N: np.ndarray) -> np.ndarray:
    """By table: all edges are multiples of 1e-4."""
    return _BIN_OF_PERMILLE[(mu_N * 10000).astype(np.int16)]


def _position_cells(
    offsets: np.ndarray, known_N: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cells (response, position bin) that hold measured tokens, in order -> row, bin, first measured token, tokens.

    Positions grow along a response, so a cell is a stretch of the packed vectors and its sums need no scatter.
    """
    row_C, bin_C = np.nonzero(np.diff(offsets)[:, None] > _EDGES)
    start_C = offsets[row_C] + _EDGES[bin_C]
    if count != len(known_N):  # positions are those of all tokens, sums are over the measured ones
        start_C = np.concatenate([[0], np.cumsum(known_N)])[start_C]
    n_C = np.diff(np.append(start_C, count))
    filled = n_C > 0
    return row_C[filled], bin_C[filled], start_C[filled], n_C[filled].astype(float)


def _finite(value):
    """JSON has no NaN: a number that does not exist is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
