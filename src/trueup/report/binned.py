"""Means by bin with 95% intervals clustered by response, streamed: memory does not grow with the dump."""

from __future__ import annotations

import numpy as np

from trueup.mismatch import _student_t975

# Probabilities are binned by their logit: most sampled tokens lie above 0.99, where a linear axis shows nothing.
PROBABILITY_LOGITS = np.arange(-9.0, 9.5, 0.75)
# Positions and lengths double every fourth edge; the last bin is open.
POSITIONS = np.unique(np.round(2.0 ** np.arange(0, 17.25, 0.25)).astype(np.int64))


class Binned:
    """Sums of a value of tokens by bin and by response. The mean is a ratio of sums over responses, as in `mismatch`."""

    def __init__(self, bins: int):
        # Rows: tokens, responses, sum of values, and over responses the sums of total^2, total * tokens, tokens^2.
        self.sums = np.zeros((6, bins))

    @property
    def tokens(self) -> np.ndarray:
        return self.sums[0]

    @property
    def responses(self) -> np.ndarray:
        return self.sums[1]

    def add(self, bin_N: np.ndarray, row_N: np.ndarray, rows: int, value_N: np.ndarray) -> None:
        """Tokens of whole responses; a response must not be split over calls."""
        bins = self.sums.shape[1]
        cell_N = row_N * bins + bin_N
        tokens = np.bincount(cell_N, minlength=rows * bins).reshape(rows, bins).astype(float)
        total = np.bincount(cell_N, weights=value_N, minlength=rows * bins).reshape(rows, bins)
        terms = (tokens, tokens > 0, total, total * total, total * tokens, tokens * tokens)
        self.sums += np.stack([term.sum(0) for term in terms])

    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and half of its 95% interval by bin: NaN where a bin is empty, and the half also below two responses."""
        tokens, responses, total, total_square, total_tokens, tokens_square = self.sums
        tokens = np.where(tokens > 0, tokens, np.nan)
        mean = total / tokens
        residual = total_square - 2 * mean * total_tokens + mean**2 * tokens_square
        scale = np.where(responses > 1, responses / np.maximum(responses - 1, 1), np.nan)
        deviation = np.sqrt(np.maximum(residual, 0) * scale) / tokens
        t = np.array([_student_t975(int(count) - 1) if count > 1 else np.nan for count in responses])
        return mean, t * deviation


class BySteps:
    """The same by training step; which steps there are is not known beforehand."""

    def __init__(self):
        self._sums: dict[int, np.ndarray] = {}

    def add(self, step_B: np.ndarray, row_N: np.ndarray, value_N: np.ndarray) -> None:
        steps, index_B = np.unique(step_B, return_inverse=True)
        part = Binned(len(steps))
        part.add(index_B[row_N], row_N, len(step_B), value_N)
        for step, sums in zip(steps.tolist(), part.sums.T):
            if sums[0]:
                self._sums[step] = self._sums.get(step, 0) + sums

    def binned(self) -> tuple[list[int], Binned]:
        """The steps in order, and their bins."""
        steps, found = sorted(self._sums), Binned(len(self._sums))
        if steps:
            found.sums = np.stack([self._sums[step] for step in steps], axis=1)
        return steps, found
