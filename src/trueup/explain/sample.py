"""A bounded, uniform sample of whole responses, and the views of it that the signatures test.

Statistics run over every token; the tests for causes need whole responses. A response is kept when a hash of its own
content lies below a threshold, which halves whenever the sample outgrows its bound. What is kept therefore does not
depend on the order of rows or files, and a dump below the bound is kept whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.explain.dump import Batch

TOKENS_KEPT = 1_000_000
LOGIT_RANGE = 9.0
"""Log-odds beyond this are rounding: 1 - p is then below 1.2e-4, where float32 log-probs have few digits left."""
_SMALLEST = 1e-6


class Sampler:
    def __init__(self, bound: int = TOKENS_KEPT):
        self.bound, self.threshold, self.tokens = bound, np.uint64(2**64 - 1), 0
        self.parts: list[tuple[Batch, np.ndarray]] = []
        self.seen_rows = 0

    def add(self, batch: Batch) -> None:
        self.seen_rows += len(batch.lengths)
        key_B = _content_hash(batch)
        keep_B = key_B <= self.threshold
        if not keep_B.any():
            return
        self.parts.append((_rows(batch, keep_B), key_B[keep_B]))
        self.tokens += int(batch.lengths[keep_B].sum())
        while self.tokens > self.bound and len(self.parts) and self._rows_kept() > 64:
            self.threshold = np.uint64(int(self.threshold) // 2)
            self.parts = [(_rows(part, key <= self.threshold), key[key <= self.threshold]) for part, key in self.parts]
            self.parts = [(part, key) for part, key in self.parts if len(key)]
            self.tokens = sum(int(part.offsets[-1]) for part, _ in self.parts)

    def _rows_kept(self) -> int:
        return sum(len(key) for _, key in self.parts)

    def sample(self) -> Sample:
        parts = [part for part, _ in self.parts]
        joined = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
        lengths_B = np.concatenate([part.lengths for part in parts])
        with_ids = all(part.ids_N is not None for part in parts)
        return Sample(
            offsets=np.concatenate([[0], np.cumsum(lengths_B)]),
            sampler_N=np.concatenate([part.sampler_N for part in parts]).astype(np.float64),
            learner_N=np.concatenate([part.learner_N for part in parts]).astype(np.float64),
            mask_N=np.concatenate([part.mask_N for part in parts]),
            unequal_B=np.concatenate([part.unequal_B for part in parts]),
            number_B=np.concatenate([part.row_B for part in parts]),
            columns=joined,
            ids_N=np.concatenate([part.ids_N for part in parts]) if with_ids else None,
            engine=next((part.engine for part in parts if part.engine), ""),
            seen_rows=self.seen_rows,
        )


@dataclass
class Sample:
    """B responses, N tokens. `claimed_N` marks the tokens that a cause found earlier already accounts for."""

    offsets: np.ndarray
    sampler_N: np.ndarray
    learner_N: np.ndarray
    mask_N: np.ndarray
    unequal_B: np.ndarray
    number_B: np.ndarray
    columns: dict[str, np.ndarray]
    ids_N: np.ndarray | None
    engine: str
    seen_rows: int

    def __post_init__(self):
        lengths_B = np.diff(self.offsets)
        self.row_N = np.repeat(np.arange(len(lengths_B)), lengths_B)
        self.position_N = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], lengths_B)
        self.cluster_N = self._clusters()[self.row_N]
        """The unit of the tests. Samples of a prompt share contexts, so the prompt is the unit where there are enough."""
        self.known_N = self.mask_N & np.isfinite(self.sampler_N) & np.isfinite(self.learner_N)
        self.log_rho_N = np.where(self.known_N, self.learner_N - self.sampler_N, 0.0)
        self.claimed_N = np.zeros(len(self.row_N), bool)
        x_N, y_N = log_odds(self.sampler_N), log_odds(self.learner_N)
        self.odds_N = (x_N + y_N) / 2
        """Mean of the two log-odds: the neutral abscissa (Bland and Altman), noise on either side cancels."""
        self.gap_N = np.clip(y_N - x_N, -8.0, 8.0)
        """Difference of log-odds, learner minus sampler. Noise of logits has the same size at every probability here,
        while log rho shrinks as (1 - p): one scale serves all tokens."""
        informative = (
            (self.sampler_N < -_SMALLEST) & (self.learner_N < -_SMALLEST) & (np.abs(self.odds_N) < LOGIT_RANGE)
        )
        self.informative_N = self.known_N & informative

    def _clusters(self) -> np.ndarray:
        """By prompt of a step, or by response where groups are not known or fewer than 8."""
        rows = np.arange(len(self.offsets) - 1)
        group_B = self.columns["group"]
        if (group_B < 0).any():
            return rows
        keys = np.stack([self.columns["step"], group_B])
        cluster_B = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        return cluster_B if len(rows) and cluster_B.max() >= 7 else rows

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def fraction(self) -> float:
        """Of the dump's responses that the sample holds."""
        return len(self.lengths) / max(self.seen_rows, 1)

    def free(self) -> np.ndarray:
        """Indices of informative tokens that no cause has claimed."""
        return np.flatnonzero(self.informative_N & ~self.claimed_N)

    def mass(self, tokens_N: np.ndarray) -> float:
        """Share of the summed |log rho|, bounded by 20 a token, that these tokens (a mask) hold."""
        size_N = np.minimum(np.abs(self.log_rho_N), 20.0)
        return float(size_N[tokens_N].sum()) / (float(size_N.sum()) or 1.0)

    def mass_of(self, rows: np.ndarray) -> float:
        """The same for the unclaimed tokens of these rows."""
        return self.mass(np.isin(self.row_N, rows) & ~self.claimed_N)

    def rows_of(self, tokens: np.ndarray) -> np.ndarray:
        """Sample rows that hold these tokens (indices or a mask)."""
        return np.unique(self.row_N[tokens])


def log_odds(logprob: np.ndarray) -> np.ndarray:
    """log p - log(1 - p)."""
    with np.errstate(invalid="ignore"):
        bounded = np.minimum(logprob, -1e-9)
        return bounded - np.log(-np.expm1(bounded))


def _rows(batch: Batch, keep_B: np.ndarray) -> Batch:
    keep_N = np.repeat(keep_B, batch.lengths)
    return Batch(
        offsets=np.concatenate([[0], np.cumsum(batch.lengths[keep_B])]),
        sampler_N=batch.sampler_N[keep_N],
        learner_N=batch.learner_N[keep_N],
        mask_N=batch.mask_N[keep_N],
        unequal_B=batch.unequal_B[keep_B],
        row_B=batch.row_B[keep_B],
        columns={name: values[keep_B] for name, values in batch.columns.items()},
        ids_N=None if batch.ids_N is None else batch.ids_N[keep_N],
        engine=batch.engine,
    )


def _content_hash(batch: Batch) -> np.ndarray:
    """uint64 [B] from the bits of the first, middle and last values of both log-probs and the length (splitmix64)."""
    key_B = batch.lengths.astype(np.uint64) + (
        batch.columns["group"].astype(np.int64).astype(np.uint64) << np.uint64(20)
    )
    filled = batch.lengths > 0
    for values in (batch.sampler_N, batch.learner_N):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        for part in (0.0, 0.25, 0.5, 0.75, 1.0):
            at = batch.offsets[:-1][filled] + (part * (batch.lengths[filled] - 1)).astype(np.int64)
            key_B[filled] = _mix(key_B[filled] ^ bits[at].astype(np.uint64))
    return key_B


def _mix(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
