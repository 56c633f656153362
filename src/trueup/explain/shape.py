"""How a systematic gap is made: three numbers without a scale that tell another prompt from other weights."""

from __future__ import annotations

import math

import numpy as np

from trueup.explain.sample import Sample

NAMES = ("fade", "tokens", "persistence")
WITHOUT_IDS = [0, 2]
COEFFICIENTS = {
    True: (np.array([8.98, -1.28, -2.24]), -1.79),
    False: (np.array([9.88, -2.81]), -1.96),
}
"""Log-odds of `prompt` against `weights`: slopes and intercept, with token ids and without. Fitted by
bench/explain_confusion.py --fit; its error rates are in docs/explain.md."""
TEXT = 8
PROMPTS = 64
_SMALL = 0.03
"""Correlations below this are noise; added to both sides of a ratio, so that noise over noise is near 1."""


def chance_of_prompt(shape: np.ndarray, with_ids: bool) -> float:
    slopes, intercept = COEFFICIENTS[with_ids]
    return 1 / (1 + math.exp(-float((shape if with_ids else shape[WITHOUT_IDS]) @ slopes + intercept)))


def describe_shape(sample: Sample, free: np.ndarray, residual_N: np.ndarray, scale: float) -> np.ndarray:
    """[len(NAMES)] numbers of the residual gap of the `free` tokens, bounded at 4 x `scale` (6 x for sizes).

    With L the length of long responses (90% quantile):

    fade: log of the mean |gap| at positions L/16 to L/4 over that from L/2 on. A response becomes its own context, so
    another prompt matters less and less; other weights matter to the end. The very first tokens are left out: they are
    format, and both causes upset them.
    tokens: log of the covariance of equal token ids in different prompts, from position L/16 on, over that with the next
    token. Other weights favour the same ids everywhere, another prompt what fits its own text.
    persistence: log of the covariance at lags 4 to 8 over that with the next token. Other weights lean one way for longer.

    Covariances between different tokens do not see white noise (kernels, int8), and in their ratios its size cancels;
    `fade` shrinks with it, towards 0.
    """
    bounded_N = np.clip(residual_N, -4 * scale, 4 * scale)
    variance = float(np.mean(bounded_N[free] ** 2)) or 1.0
    is_free_N = np.zeros(len(residual_N), bool)
    is_free_N[free] = True
    products = {lag: _products(sample, free, is_free_N, bounded_N, lag) / variance for lag in (1, 4, 5, 6, 7, 8)}
    next_token = _log(_mean(products.pop(1)))
    far = _log(_mean(np.concatenate(list(products.values()))))
    position, long = sample.position_N[free], float(np.quantile(sample.lengths, 0.9))
    size = np.minimum(np.abs(residual_N[free]), 6 * scale)
    before = _mean(size[(position >= long / 16) & (position < long / 4)])
    after = _mean(size[position >= long / 2])
    tokens = 0.0
    if sample.ids_N is not None:
        at = free[position >= long / 16]
        values, group = bounded_N[at] / math.sqrt(variance), sample.cluster_N[at]
        tokens = _log(_across(values - values.mean(), sample.ids_N[at], group)) - next_token if len(at) else 0.0
    return np.array([math.log(before / after) if before and after else 0.0, tokens, far - next_token])


def favoured(sample: Sample, free: np.ndarray, residual_N: np.ndarray, scale: float) -> tuple[float, float]:
    """Do the same token ids gain and lose in every prompt? -> (correlation of equal ids across prompts, its z).

    The correlation is that of `tokens` above, from position TEXT on, of at most PROMPTS prompts, bounded at twice the
    scale. Its error is that under random signs, one for each prompt: what prompts do not have in common cancels then.
    """
    if sample.ids_N is None or scale == 0:
        return 0.0, 0.0
    at = free[sample.position_N[free] >= TEXT]
    # Prompts are chosen by what they hold, evenly, so that the order of rows does not matter.
    units, unit = np.unique(sample.cluster_N[at], return_inverse=True)
    order = np.argsort(np.bincount(unit, sample.sampler_N[at]), kind="stable")
    kept = units[order[:: max(1, len(units) // PROMPTS)][:PROMPTS]]
    at = at[np.isin(sample.cluster_N[at], kept)]
    if len(at) < 100 or len(kept) < 4:
        return 0.0, 0.0
    values = np.clip(residual_N[at], -2 * scale, 2 * scale)
    values = (values - values.mean()) / max(float(values.std()), 1e-12)
    _, kind = np.unique(sample.ids_N[at], return_inverse=True)
    _, prompt = np.unique(sample.cluster_N[at], return_inverse=True)
    shape = (int(kind.max()) + 1, int(prompt.max()) + 1)
    cell = kind * shape[1] + prompt
    sums_KP, n_KP = (np.bincount(cell, weights, shape[0] * shape[1]).reshape(shape) for weights in (values, None))
    pairs_K = n_KP.sum(1) ** 2 - (n_KP**2).sum(1)
    weight_K = np.where(pairs_K > 0, np.minimum(np.sqrt(pairs_K), 10.0) / np.maximum(pairs_K, 1), 0.0)
    shared_PP = (sums_KP * weight_K[:, None]).T @ sums_KP
    np.fill_diagonal(shared_PP, 0.0)
    total = float((weight_K * pairs_K).sum())
    error = math.sqrt(2 * float((shared_PP**2).sum()))
    return (float(shared_PP.sum()) / total, float(shared_PP.sum()) / error) if total > 0 and error > 0 else (0.0, 0.0)


def _log(correlation: float) -> float:
    return math.log(max(correlation, 0.0) + _SMALL)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _products(sample: Sample, free: np.ndarray, is_free_N: np.ndarray, values_N: np.ndarray, lag: int) -> np.ndarray:
    """Products of free tokens with their `lag`-th next of the same response."""
    at = free[free + lag < len(is_free_N)]
    at = at[is_free_N[at + lag] & (sample.row_N[at + lag] == sample.row_N[at])]
    return values_N[at] * values_N[at + lag]


def _across(values: np.ndarray, ids: np.ndarray, group: np.ndarray) -> float:
    """Mean product of two tokens of one id in different prompts; ids weigh by the root of their pairs, at most 10."""
    _, at = np.unique(ids, return_inverse=True)
    _, prompt = np.unique(group, return_inverse=True)
    both, cell = np.unique(at.astype(np.int64) * (prompt.max() + 1) + prompt, return_inverse=True)
    id_of_cell = both // (prompt.max() + 1)
    kinds = int(at.max()) + 1
    within = lambda weights: np.bincount(id_of_cell, np.bincount(cell, weights) ** 2, kinds)  # noqa: E731
    ones = np.ones(len(values))
    sums = np.bincount(at, values, kinds) ** 2 - within(values)
    pairs = np.bincount(at, ones, kinds) ** 2 - within(ones)
    seen = pairs > 0
    weight = np.minimum(np.sqrt(pairs[seen]), 10.0)
    return float((sums[seen] / pairs[seen] * weight).sum() / weight.sum()) if seen.any() else 0.0
