"""Causes in which the two log-probs belong to different tokens: misaligned, retokenised."""

from __future__ import annotations

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.sample import Sample
from trueup.explain.significance import binomial_tail
from trueup.explain.where import describe

LAGS = tuple(lag for size in range(1, 9) for lag in (-size, size))
BLOCK = 32
"""Tokens; the smallest stretch in which a lag is told with certainty at ordinary entropy."""
LEVEL = 0.001
BLOCK_LEVEL = 1e-4


def shifted(sample: Sample) -> Finding | None:
    """Does another lag fit better than lag 0, block by block?

    For each token that can tell (one of the two distances above 0.1 nats) the lag wins when |log pi_t - log mu_{t+lag}| is
    below a quarter of |log pi_t - log mu_t|, and loses when it is above four times it. Two series that belong to the same
    tokens at lag 0, however noisy, lose; two unrelated series win and lose equally. So wins are at most binomial(1/2)
    unless the lag is true. LEVEL is shared by all lags and blocks (Bonferroni),
    or the number of blocks below BLOCK_LEVEL is beyond chance at LEVEL.

    One lag for a whole response is a shift: `misaligned`. A lag that begins inside the response or changes along it
    is not: positions drift apart where text was cut into other tokens, `retokenised`.
    """
    usable_N = sample.known_N & ~sample.claimed_N
    count = int(sample.offsets[-1])
    if count < 4:
        return None
    block_N = sample.position_N // BLOCK
    blocks_B = np.maximum(-(-sample.lengths // BLOCK), 1)
    first_B = np.cumsum(blocks_B) - blocks_B
    cell_N = first_B[sample.row_N] + block_N
    cells, row_C = int(blocks_B.sum()), np.repeat(np.arange(len(blocks_B)), blocks_B)
    here_N = np.minimum(np.abs(sample.log_rho_N), 20.0)
    level = LEVEL / (len(LAGS) * max(cells, 1))
    best_C, lag_C = np.ones(cells), np.zeros(cells, int)
    zero_C = np.ones(cells, bool)
    best_B, rowlag_B = np.ones(len(blocks_B)), np.zeros(len(blocks_B), int)
    for lag in LAGS:
        other, ok_N = _moved(sample, usable_N, lag)
        there_N = np.minimum(np.abs(sample.learner_N - other), 20.0, where=ok_N, out=np.zeros(count))
        tell_N = ok_N & (np.maximum(here_N, there_N) > 0.1)
        win_N, lose_N = tell_N & (there_N * 4 < here_N), tell_N & (here_N * 4 < there_N)
        win_C, lose_C = np.bincount(cell_N[win_N], minlength=cells), np.bincount(cell_N[lose_N], minlength=cells)
        zero_C &= lose_C > win_C
        p_C = _half_tail(win_C, lose_C)
        better = p_C < best_C
        best_C[better], lag_C[better] = p_C[better], lag
        p_B = _half_tail(np.bincount(row_C, win_C), np.bincount(row_C, lose_C))
        better = p_B < best_B
        best_B[better], rowlag_B[better] = p_B[better], lag
    # Many blocks that are each nearly certain are as good as one that is quite certain.
    many = binomial_tail(int((best_C < BLOCK_LEVEL).sum()), cells * len(LAGS), BLOCK_LEVEL) < LEVEL
    lag_C[best_C >= (BLOCK_LEVEL if many else level)] = 0
    told_C = (lag_C != 0) | zero_C
    shifted_B = best_B < LEVEL / (len(LAGS) * len(blocks_B))
    some_B = np.bincount(row_C, lag_C != 0, len(blocks_B)) > 0
    if not (shifted_B | some_B).any():
        return None
    # Kinds of lag in a response, among the blocks that tell.
    kinds_B = np.zeros(len(blocks_B), int)
    for lag in (0, *LAGS):
        kinds_B += np.bincount(row_C, told_C & (lag_C == lag), len(blocks_B)) > 0
    drifting_B = some_B & (kinds_B > 1)
    constant_B = (shifted_B | some_B) & ~drifting_B
    # Drift is rarely proved in a response that only shifts; most responses that drift show one lag for certain.
    if drifting_B.sum() * 4 > constant_B.sum():
        return _retokenised(sample, np.flatnonzero(drifting_B | constant_B))
    return _misaligned(sample, np.flatnonzero(constant_B | drifting_B), rowlag_B)


def _moved(sample: Sample, usable_N: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """log mu at position t + lag of the same response, and where both exist."""
    count = len(usable_N)
    at = np.clip(np.arange(count) + lag, 0, count - 1)
    same = (sample.row_N[at] == sample.row_N) & (np.arange(count) + lag == at)
    return sample.sampler_N[at], same & usable_N & usable_N[at]


def _half_tail(win: np.ndarray, lose: np.ndarray) -> np.ndarray:
    """Chernoff's bound on P(wins >= win) at chance 1/2."""
    n = np.maximum(win + lose, 1)
    rate = np.clip(win / n, 1e-12, 1 - 1e-12)
    kl = rate * np.log(2 * rate) + (1 - rate) * np.log(2 * (1 - rate))
    return np.where(rate > 0.5, np.exp(-n * kl), 1.0)


def _misaligned(sample: Sample, rows: np.ndarray, lag_B: np.ndarray) -> Finding:
    lags, counts = np.unique(lag_B[rows], return_counts=True)
    lag = int(lags[counts.argmax()])
    in_rows = np.isin(sample.row_N, rows)
    sample.claimed_N |= in_rows & sample.known_N
    direction = "later" if lag > 0 else "earlier"
    return Finding(
        "misaligned",
        0.99,
        describe(sample, rows),
        f"The learner's log-probs match the sampler's {abs(lag)} position{'s' if abs(lag) > 1 else ''} {direction} "
        "better than at their own position, throughout these responses.",
        "Shift one side: logits at position t predict token t+1, so log-probs of the response start one position before "
        "its first token.",
        rows,
    )


def _retokenised(sample: Sample, rows: np.ndarray) -> Finding:
    # Where the drift is too short to be proved, tokens that one side is sure of and the other rules out mark the rest.
    rows = np.union1d(rows, sample.rows_of(_contradicted(sample) & ~sample.claimed_N))
    sample.claimed_N |= np.isin(sample.row_N, rows) & sample.known_N
    return Finding(
        "retokenised",
        0.95,
        describe(sample, rows),
        "The two series agree at the start of these responses and then drift apart by a growing number of positions, as "
        "when the text was cut into other tokens.",
        "Pass the sampler's token ids to the learner; never decode and encode again. --tokenizer MODEL proves it.",
        rows,
    )


def _contradicted(sample: Sample) -> np.ndarray:
    return sample.known_N & (sample.sampler_N > -0.7) & (sample.learner_N < -7)


def bursts(sample: Sample) -> Finding | None:
    """Rare tokens that the sampler was sure of and the learner rules out, among tokens that agree to the ordinary floor:
    `retokenised` without drift, or, when they begin the responses, `prompt`.

    Under the sampler's own distribution a token with mu > 1/2 whose pi is below e^-7 costs the learner a KL of 3 nats
    there; a difference of weights large enough for that shows in most other tokens as well. The bulk (median |gap|) must
    therefore be at the floor, the rate above 2 in 1,000 (binomial, LEVEL), and moderate differences (1 to 7 nats) no more than
    twice as many: another context leaves far more of those than of contradictions.
    """
    free = sample.free()
    every = np.flatnonzero(sample.known_N & ~sample.claimed_N)
    if len(every) < 200:
        return None
    # Log-odds of sure tokens leave the informative range, so the count is over all tokens, the bulk over informative ones.
    hit = _contradicted(sample)[every]
    hits = int(hit.sum())
    if hits < 5 or len(free) == 0 or np.median(np.abs(sample.gap_N[free])) > 0.25:
        return None
    size = np.abs(sample.log_rho_N[every])
    moderate = int(((size > 1) & (size < 7)).sum())
    if moderate > 2 * hits or binomial_tail(hits, len(every), 0.002) > LEVEL:
        return None
    tokens = every[hit]
    rows = sample.rows_of(tokens)
    sample.claimed_N[tokens] = True
    if (sample.position_N[tokens] < 2).mean() > 0.8:
        return Finding(
            "prompt",
            0.8,
            describe(sample, rows, tokens),
            f"{hits} responses begin with a token that the sampler was sure of and the learner rules out: the end of the "
            "prompt is not the same for both.",
            "Compare the learner's input ids with the engine's prompt ids: chat template, generation prompt, BOS.",
            rows,
        )
    return Finding(
        "retokenised",
        0.7,
        describe(sample, rows, tokens),
        f"{hits} tokens that the sampler was sure of (above 1/2) are below e^-7 for the learner, while the rest agrees: "
        "the learner seems to have scored other tokens there.",
        "Pass the sampler's token ids to the learner; never decode and encode again. --tokenizer MODEL proves it.",
        rows,
    )
