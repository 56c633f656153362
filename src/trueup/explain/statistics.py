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
STEPS_KEPT = 100_000
"""Steps told apart; a longer run is reported in steps that are merged in pairs."""
_LOG_RHO_EDGES = np.concatenate([[0], np.logspace(-7, 2, 361)])


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
        self.rows = self.tokens = self.missing = self.unequal_rows = self.impossible = 0
        self.all = ClusteredMean(1, 5)
        self.position = ClusteredMean(len(POSITION_EDGES) - 1, 5)
        self.length = ClusteredMean(len(POSITION_EDGES) - 1, 5)
        self.probability = ClusteredMean(len(PROBABILITY_EDGES) - 1, 5)
        self.steps: dict[int, ClusteredMean] = {}
        self.histogram = np.zeros(len(_LOG_RHO_EDGES) - 1, np.int64)
        self.prob_diff_max = self.log_rho_max = 0.0
        self._token_weights, self._response_weights = _LogSums(), _LogSums()
        self._position_bin = np.digitize(np.arange(1 << 16), POSITION_EDGES).astype(np.int8) - 1

    def add(self, batch: Batch, known_N: np.ndarray, sampler_N: np.ndarray, learner_N: np.ndarray, row_N: np.ndarray):
        """`known_N` picks the measured tokens of the batch; the other vectors hold only those."""
        lengths_B = batch.lengths
        self.rows += len(lengths_B)
        self.unequal_rows += int(batch.unequal_B.sum())
        self.tokens += len(sampler_N)
        self.missing += int(batch.mask_N.sum()) - len(sampler_N)
        if len(sampler_N) == 0:
            return
        rows = len(lengths_B)
        log_rho_N = learner_N - sampler_N
        clipped_N = np.minimum(log_rho_N, 80.0)
        rho_N = np.exp(clipped_N)
        abs_N = np.abs(log_rho_N)
        mu_N = np.exp(np.minimum(sampler_N, 0.0))
        diff_N = np.abs(np.exp(np.minimum(learner_N, 0.0)) - mu_N)
        # rho - 1 loses all digits near agreement: below 1e-3 the series is exact to float32.
        k3_N = np.where(abs_N < 1e-3, 0.5 * log_rho_N * log_rho_N, rho_N - 1 - clipped_N)
        quantities = (k3_N, -log_rho_N, abs_N, rho_N, diff_N)
        self.impossible += int((sampler_N > 0).sum() + (learner_N > 0).sum())
        self.prob_diff_max = max(self.prob_diff_max, float(diff_N.max()))
        self.log_rho_max = max(self.log_rho_max, float(abs_N.max()))
        self.histogram += np.histogram(abs_N, _LOG_RHO_EDGES)[0]

        n_B = np.bincount(row_N, minlength=rows)
        sums = [np.bincount(row_N, values, rows) for values in quantities]
        filled = n_B > 0
        n_B, sums = n_B[filled].astype(float), [s[filled] for s in sums]
        self.all.add(np.zeros(len(n_B), np.int64), n_B, sums)
        self.length.add(np.digitize(lengths_B[filled], POSITION_EDGES) - 1, n_B, sums)
        step_B = batch.columns["step"][filled].astype(np.int64)
        for step in np.unique(step_B):
            here = step_B == step
            at = self.steps.setdefault(int(step), ClusteredMean(1, 5)) if len(self.steps) < STEPS_KEPT else self.all
            if at is not self.all:
                at.add(np.zeros(int(here.sum()), np.int64), n_B[here], [s[here] for s in sums])
        position_N = np.arange(batch.offsets[-1]) - np.repeat(batch.offsets[:-1], lengths_B)
        position_N = position_N[known_N] if len(position_N) != len(sampler_N) else position_N
        self._cells(self.position, self._position_bin[np.minimum(position_N, (1 << 16) - 1)], row_N, quantities)
        self._cells(self.probability, _probability_bin(mu_N), row_N, quantities)
        self._token_weights.add(clipped_N)
        self._response_weights.add(-sums[1])

    def _cells(self, into: ClusteredMean, bin_N, row_N, quantities) -> None:
        bins = len(into.n)
        cell_N = row_N * bins + bin_N
        cells = (int(row_N[-1]) + 1) * bins
        n_C = np.bincount(cell_N, minlength=cells)
        filled = np.flatnonzero(n_C)
        # The two that are read by bin; the other quantities would only cost time.
        sums = [np.bincount(cell_N, quantities[k], cells)[filled] for k in (0, 2)]
        zero = np.zeros(len(filled))
        into.add(filled % bins, n_C[filled].astype(float), [sums[0], zero, sums[1], zero, zero])

    def quantile(self, q: float) -> float:
        """Of |log rho|, to the width of a histogram bin (6%)."""
        cumulative = np.cumsum(self.histogram)
        if cumulative[-1] == 0:
            return math.nan
        i = int(np.searchsorted(cumulative, q * cumulative[-1]))
        return float(_LOG_RHO_EDGES[min(i + 1, len(_LOG_RHO_EDGES) - 1)])

    def as_dict(self) -> dict:
        intervals = {name: self.all.interval(k) for k, name in enumerate(self.QUANTITIES)}
        scored = self.tokens + self.missing
        numbers = {
            "rows": self.rows,
            "tokens": self.tokens,
            "missing_fraction": self.missing / scored if scored else 0.0,
            "rows_with_unequal_lengths": self.unequal_rows,
            "impossible_logprobs": self.impossible,
            "kl_k3": intervals["k3"],
            "kl_k1": intervals["k1"],
            "log_rho_abs": intervals["log_rho_abs"],
            "log_rho_abs_q50": self.quantile(0.5),
            "log_rho_abs_q99": self.quantile(0.99),
            "log_rho_abs_max": self.log_rho_max,
            "rho": intervals["rho"],
            "prob_diff": intervals["prob_diff"],
            "prob_diff_max": self.prob_diff_max,
            "ess_token": self._token_weights.ess(),
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


def _probability_bin(mu_N: np.ndarray) -> np.ndarray:
    """By table: all edges are multiples of 1e-4."""
    return _BIN_OF_PERMILLE[(mu_N * 10000).astype(np.int16)]


def _finite(value):
    """JSON has no NaN: a number that does not exist is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
