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
RELATED = 0.10
"""Share of tokens closer to their neighbours' values than to their own: over all responses up to .02 under other weights
(.06 for a model taken apart), up to .04 under another question's prompt; unrelated series .3 to .5."""
SUSPECT = 0.01
IN_ORDER = 0.6
"""Rank correlation of two series that belong together."""


def shifted(sample: Sample) -> Finding | None:
    """Does another lag fit better than lag 0, block by block, or does lag 0 fit no better than any other?

    For each token that can tell (one of the two distances above 0.1 nats) the lag wins when |log pi_t - log mu_{t+lag}| is
    below a quarter of |log pi_t - log mu_t|, and loses when it is above four times it. Two series that belong to the same
    tokens at lag 0, however noisy, lose; two unrelated series win and lose equally. So wins are at most binomial(1/2)
    unless the lag is true. LEVEL is shared by all lags and blocks (Bonferroni),
    or the number of blocks below BLOCK_LEVEL is beyond chance at LEVEL.

    A token is astray when most lags beat lag 0 there. Of the tokens of two series that belong together at most
    RELATED are, of unrelated ones half: a response is unrelated from some block on (binomial at LEVEL over all starts).

    One lag for a whole response is a shift: `misaligned`. A lag that begins inside the response or changes along it, or a
    response that no lag fits, is not: positions drift apart where text was cut into other tokens, `retokenised`.
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
    wins_N, losses_N = np.zeros(count, np.int8), np.zeros(count, np.int8)
    for lag in LAGS:
        other, ok_N = _moved(sample, usable_N, lag)
        there_N = np.minimum(np.abs(sample.learner_N - other), 20.0, where=ok_N, out=np.zeros(count))
        tell_N = ok_N & (np.maximum(here_N, there_N) > 0.1)
        win_N, lose_N = tell_N & (there_N * 4 < here_N), tell_N & (here_N * 4 < there_N)
        wins_N += win_N
        losses_N += lose_N
        win_C, lose_C = np.bincount(cell_N[win_N], minlength=cells), np.bincount(cell_N[lose_N], minlength=cells)
        zero_C &= lose_C > win_C
        p_C = _chernoff(win_C, win_C + lose_C, 0.5)
        better = p_C < best_C
        best_C[better], lag_C[better] = p_C[better], lag
        win_B, lose_B = np.bincount(row_C, win_C), np.bincount(row_C, lose_C)
        p_B = _chernoff(win_B, win_B + lose_B, 0.5)
        better = p_B < best_B
        best_B[better], rowlag_B[better] = p_B[better], lag
    # Many blocks that are each nearly certain are as good as one that is quite certain.
    many = binomial_tail(int((best_C < BLOCK_LEVEL).sum()), cells * len(LAGS), BLOCK_LEVEL) < LEVEL
    lag_C[best_C >= (BLOCK_LEVEL if many else level)] = 0
    told_C = (lag_C != 0) | zero_C
    shifted_B = best_B < LEVEL / (len(LAGS) * len(blocks_B))
    some_B = np.bincount(row_C, lag_C != 0, len(blocks_B)) > 0
    unrelated_B = _unrelated(sample, wins_N, losses_N, cell_N, row_C)
    if not (shifted_B | some_B | unrelated_B).any():
        return None
    # Kinds of lag in a response, among the blocks that tell.
    kinds_B = np.zeros(len(blocks_B), int)
    for lag in (0, *LAGS):
        kinds_B += np.bincount(row_C, told_C & (lag_C == lag), len(blocks_B)) > 0
    drifting_B = (some_B & (kinds_B > 1)) | (unrelated_B & ~shifted_B)
    constant_B = (shifted_B | some_B) & ~drifting_B
    # Drift is rarely proved in a response that only shifts; most responses that drift show one lag for certain.
    if drifting_B.sum() * 4 > constant_B.sum():
        return _retokenised(sample, np.flatnonzero(drifting_B | constant_B))
    return _misaligned(sample, np.flatnonzero(constant_B | drifting_B), rowlag_B)


def _unrelated(
    sample: Sample, wins_N: np.ndarray, losses_N: np.ndarray, cell_N: np.ndarray, row_C: np.ndarray
) -> np.ndarray:
    """bool [B]: from some block on, more tokens than RELATED lie closer to their neighbours' values than to their own."""
    cells, rows = len(row_C), len(sample.lengths)
    tell_N = wins_N + losses_N >= 4
    astray_N = tell_N & (wins_N > losses_N)
    tail = lambda mask_N: np.cumsum(np.bincount(cell_N[mask_N], minlength=cells)[::-1])[::-1]  # noqa: E731
    tells_C, astray_C = tail(tell_N), tail(astray_N)
    # Sums from a block to the end of all, less those from the next response on.
    next_C = np.searchsorted(row_C, row_C, "right")
    after = lambda sums_C: sums_C - np.append(sums_C, 0)[next_C]  # noqa: E731
    p_C = _chernoff(after(astray_C), after(tells_C), RELATED)
    # As with blocks above: many responses that are each likely unrelated are as good as one that surely is.
    likely = len(np.unique(row_C[p_C < SUSPECT]))
    many = binomial_tail(likely, cells, SUSPECT) < LEVEL
    found_C = p_C < (SUSPECT if many else LEVEL / max(cells, 1))
    suspect_B = np.bincount(row_C, found_C, rows) > 0
    suspects, first = np.unique(row_C[found_C], return_index=True)
    starts_C = np.flatnonzero(found_C)[first]
    for row, start in zip(suspects, starts_C):
        # A temperature on one side also moves values towards their neighbours', but keeps their order.
        part = slice(sample.offsets[row], sample.offsets[row + 1])
        kept = tell_N[part] & (cell_N[part] >= start)
        ranks = [np.argsort(np.argsort(side[part][kept])) for side in (sample.sampler_N, sample.learner_N)]
        suspect_B[row] = np.corrcoef(*ranks)[0, 1] < IN_ORDER
    return suspect_B


def _moved(sample: Sample, usable_N: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """log mu at position t + lag of the same response, and where both exist."""
    count = len(usable_N)
    at = np.clip(np.arange(count) + lag, 0, count - 1)
    same = (sample.row_N[at] == sample.row_N) & (np.arange(count) + lag == at)
    return sample.sampler_N[at], same & usable_N & usable_N[at]


def _chernoff(hits: np.ndarray, count: np.ndarray, chance: float) -> np.ndarray:
    """Chernoff's bound on P(X >= hits) for binomial(count, chance)."""
    n = np.maximum(count, 1)
    rate = np.clip(hits / n, 1e-12, 1 - 1e-12)
    kl = rate * np.log(rate / chance) + (1 - rate) * np.log((1 - rate) / (1 - chance))
    return np.where(rate > chance, np.exp(-n * kl), 1.0)


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
        "The two series agree at the start of these responses and then drift apart, by positions or altogether, as when the "
        "text was cut into other tokens.",
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
