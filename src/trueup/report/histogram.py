"""Counts of log ratios, streamed: the bins widen as larger values arrive, so no range has to be known beforehand."""

from __future__ import annotations

import numpy as np

# Bins on each side of 0. Merging halves a side at most, so at least 1,024 always lie between 0 and the largest value.
_SIDE = 2048
_SMALLEST, _LARGEST = 2.0**-10, 2.0**9


class Histogram:
    """Symmetric about 0, where agreement lies."""

    def __init__(self):
        self.reach = _SMALLEST
        """Absolute values below this have a bin of their own; those beyond `_LARGEST` count in the outermost ones."""
        self.counts = np.zeros(2 * _SIDE, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        if not len(values):
            return
        largest = float(np.abs(values).max())
        while self.reach <= min(largest, _LARGEST / 2):
            self._widen()
        # Adding a half turn of the axis first keeps -0.0 and 0.0 in the same bin.
        bins = np.floor((values / self.reach + 1) * _SIDE).clip(0, 2 * _SIDE - 1).astype(np.int64)
        self.counts += np.bincount(bins, minlength=2 * _SIDE)

    def _widen(self) -> None:
        merged = self.counts.reshape(-1, 2).sum(1)
        self.counts = np.pad(merged, _SIDE // 2)
        self.reach *= 2

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """|value| that at least `share` of the values do not exceed, rounded up to a bin's edge."""
        sides = self.counts[_SIDE:] + self.counts[:_SIDE][::-1]
        bin_ = int(np.searchsorted(sides.cumsum(), share * sides.sum()))
        return (min(bin_, _SIDE - 1) + 1) * self.reach / _SIDE

    def within(self, reach: float, side: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Edges and counts of about 2 `side` bins over [-reach, reach], and how many lie below and above.

        The edges are edges of the bins that were counted, so the range may come out a little wider than asked."""
        merge = max(1, round(reach / self.reach * _SIDE / side))
        used = min(_SIDE // merge, max(1, -(-round(reach / self.reach * _SIDE) // merge)))
        low, high = _SIDE - used * merge, _SIDE + used * merge
        edges = np.arange(-used, used + 1) * merge * self.reach / _SIDE
        counts = self.counts[low:high].reshape(-1, merge).sum(1)
        return edges, counts, int(self.counts[:low].sum()), int(self.counts[high:].sum())
