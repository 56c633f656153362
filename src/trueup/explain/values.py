"""Causes that single values give away: missing, placeholder, observation."""

from __future__ import annotations

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.sample import Sample
from trueup.explain.significance import binomial_tail, clustered_test
from trueup.explain.where import describe

RUN = 4
"""A run of so many equal values is no coincidence of scattered placeholders: at 20% of the tokens, 0.2^3 = 0.8%."""
VALUES_TRIED = 64
NOTICED = 256
LESS_LIKELY = 0.3
"""Nats a token by which foreign text must be less likely than the response's own."""
LEVEL = 1e-5
"""For one value; over VALUES_TRIED values, two sides and two places the family stays below 0.3%."""


def missing(sample: Sample) -> Finding | None:
    """Tokens in the loss without one of the log-probs, and responses with another number of log-probs than tokens."""
    absent_N = sample.mask_N & ~(np.isfinite(sample.sampler_N) & np.isfinite(sample.learner_N))
    if not absent_N.any() and not sample.unequal_B.any():
        return None
    whole = _observed(sample, absent_N, np.isfinite(sample.learner_N))
    if whole is not None:
        return whole
    side = "sampler" if (absent_N & ~np.isfinite(sample.sampler_N)).sum() * 2 >= absent_N.sum() else "learner"
    unequal = int(sample.unequal_B.sum())
    evidence = f"{absent_N.sum() / max(sample.mask_N.sum(), 1):.2%} of the tokens in the loss have no {side} log-prob"
    if unequal:
        evidence += f"; {unequal} responses have another number of log-probs than of tokens"
    rows = np.union1d(sample.rows_of(absent_N), np.flatnonzero(sample.unequal_B))
    return Finding(
        "missing",
        1.0,
        describe(sample, rows, absent_N),
        evidence + ".",
        "Drop these tokens from the loss and its denominator, and find out why the engine gave none "
        "(aborted requests, spliced or appended tokens); never fill in 0.",
        rows,
    )


def constants(sample: Sample) -> list[Finding]:
    """`placeholder` and `observation`: the same exact value where the other side says something else.

    A log-prob is a continuous number. When tokens share one exact value v, their other log-prob must still scatter about
    v just as it does for tokens whose value is close to v. The test compares how often |log rho| exceeds what 99% of
    those neighbours stay below, four times over, among tokens with at least 1/NOTICED of that; binomial at LEVEL. Where nearby values hardly
    ever repeat, five tokens in different contexts that share one are
    enough, when half of them stray beyond 90% of the neighbours. Samples of one prompt share contexts and with them exact
    values on both sides: such tokens count once. Values above 0 need no test: no probability exceeds 1.
    """
    findings = []
    bad_N = np.zeros(len(sample.row_N), bool)
    found = []
    sides = (("sampler", sample.sampler_N, sample.learner_N), ("learner", sample.learner_N, sample.sampler_N))
    for side, own_N, other_N in sides:
        impossible_N = sample.known_N & (own_N > 1e-3)
        if impossible_N.any():
            found.append((side, own_N[impossible_N], impossible_N))
            bad_N |= impossible_N
        last_N = sample.position_N == np.repeat(sample.lengths - 1, sample.lengths)
        for place_N in (last_N, ~last_N):
            for value, here_N in _repeated(sample, own_N, other_N, sample.known_N & place_N & ~bad_N, ~bad_N):
                found.append((side, np.array([value]), here_N))
                bad_N |= here_N
    if not bad_N.any():
        return findings
    constant_N = bad_N.copy()
    for side, values, _ in found:
        own_N = sample.sampler_N if side == "sampler" else sample.learner_N
        constant_N |= sample.known_N & np.isin(own_N, np.unique(values)[:1000])
    seen = _observed(sample, constant_N, sample.known_N, bad_N)
    if seen is not None:
        findings.append(seen)
        bad_N &= ~sample.claimed_N
    if bad_N.sum() >= 1:
        sample.claimed_N |= bad_N
        findings.append(_placeholder(sample, bad_N, found))
    return findings


def _repeated(sample: Sample, own_N: np.ndarray, other_N: np.ndarray, among_N: np.ndarray, control_N: np.ndarray):
    """Values that repeat exactly and contradict the other side -> (value, mask of its tokens)."""
    values, counts = np.unique(own_N[among_N], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:VALUES_TRIED]
    often = often[counts[often] >= 3]
    if not len(often):
        return
    size_N = np.abs(sample.log_rho_N)
    control = np.flatnonzero(control_N & sample.known_N)
    control = control[np.argsort(own_N[control], kind="stable")]
    control_own, among = own_N[control], np.flatnonzero(among_N)
    for value in values[often]:
        here = among[own_N[among] == value]
        near = _neighbours(control_own, value)
        if len(near) < 30:
            near = np.flatnonzero(control_own != value)
        if len(near) < 30:
            continue
        near_own, near = control_own[near], size_N[control[near]]
        # Away from 0 float32 values do not repeat at all, unless the engine rounds them: then its neighbours repeat too.
        if value < -0.02 and 1 + (np.diff(near_own) > 0).sum() > 0.8 * len(near):
            astray = np.median(size_N[here]) > np.quantile(near, 0.9)
            if astray and _contexts(sample, other_N, here) >= 5:
                yield value, _mask(here, len(own_N))
            continue
        bound = max(4 * float(np.quantile(near, 0.99)), 0.05)
        hits = here[size_N[here] > bound]
        if bound > 8 or len(hits) < 3:
            continue
        hit = _contexts(sample, other_N, hits)
        # All tokens, and those that differ at all: most tokens near 0 are certain on both sides and tell nothing.
        for least in (0.0, bound / NOTICED):
            alike, same = near[near >= least], here[size_N[here] >= least]
            chance, count = (1 + (alike > bound).sum()) / (len(alike) + 1), _contexts(sample, other_N, same)
            if hit >= 3 and hit > 5 * chance * count and binomial_tail(hit, count, chance) < LEVEL / 2:
                yield value, _mask(hits, len(own_N))
                break


def _neighbours(ordered: np.ndarray, value: float) -> np.ndarray:
    """Indices of the entries of a sorted array that are near `value` and not equal to it."""
    reach = max(0.02, 0.2 * abs(value))
    low, high = np.searchsorted(ordered, value - reach), np.searchsorted(ordered, value + reach, "right")
    first, last = np.searchsorted(ordered, value), np.searchsorted(ordered, value, "right")
    return np.r_[low:first, last:high]


def _mask(tokens: np.ndarray, count: int) -> np.ndarray:
    mask_N = np.zeros(count, bool)
    mask_N[tokens] = True
    return mask_N


def _contexts(sample: Sample, other_N: np.ndarray, at: np.ndarray) -> int:
    """Tokens of one value, those of the same prompt and position with the same other log-prob counted once."""
    keys = sample.columns["group"][sample.row_N[at]], sample.position_N[at], np.round(4 * other_N[at])
    return len(set(zip(*(key.tolist() for key in keys))))


def _observed(sample: Sample, constant_N: np.ndarray, scored_N: np.ndarray, bad_N=None) -> Finding | None:
    """Runs of tokens the sampler did not rate, implausible to the learner and followed by ordinary ones.

    Text that a tool wrote is a surprise to the policy token after token. The learner's mean log-prob inside the runs is
    compared with the same response's other tokens (response by response, z below -4).
    """
    run_N = _runs(sample, constant_N)
    bad_N = constant_N if bad_N is None else bad_N
    if (bad_N & run_N).sum() * 2 < bad_N.sum():
        return None
    inside_N, outside_N = run_N & scored_N & sample.mask_N, sample.known_N & ~constant_N
    count = len(sample.lengths)
    n_in, n_out = (
        np.bincount(sample.row_N[inside_N], minlength=count),
        np.bincount(sample.row_N[outside_N], minlength=count),
    )
    both = (n_in > 0) & (n_out > 0)
    if both.sum() < 3:
        return None
    mean = lambda keep_N, n: np.bincount(sample.row_N[keep_N], sample.learner_N[keep_N], count)[both] / n[both]  # noqa: E731
    difference = mean(inside_N, n_in) - mean(outside_N, n_out)
    z = clustered_test(difference, np.ones(both.sum()))
    if not z < -4 or difference.mean() > -LESS_LIKELY:
        return None
    rows = sample.rows_of(run_N)
    sample.claimed_N |= run_N
    return Finding(
        "observation",
        0.99,
        describe(sample, rows, run_N),
        f"{run_N.sum()} tokens in runs of {RUN} or more have no real sampler log-prob, and the learner finds them "
        f"{-difference.mean():.1f} nats a token less likely than the rest of the response.",
        "These are tokens the policy did not choose (tool output, observations): set loss_mask to false for them.",
        rows,
    )


def _runs(sample: Sample, constant_N: np.ndarray) -> np.ndarray:
    """Tokens in runs of at least RUN, within a response."""
    edge_N = np.ones(len(constant_N) + 1, bool)
    edge_N[1:-1] = (constant_N[1:] != constant_N[:-1]) | (sample.row_N[1:] != sample.row_N[:-1])
    starts = np.flatnonzero(edge_N)
    lengths = np.diff(starts)
    return constant_N & (np.repeat(lengths, lengths) >= RUN)


def _placeholder(sample: Sample, bad_N: np.ndarray, found: list) -> Finding:
    last_N = sample.position_N == np.repeat(sample.lengths - 1, sample.lengths)
    at_end = (bad_N & last_N).sum() / bad_N.sum()
    place = "the last token of responses" if at_end > 0.8 else "single tokens inside responses"
    sides = sorted({side for side, _, here_N in found if (here_N & bad_N).any()}) or ["sampler"]
    values = np.unique(np.concatenate([v for _, v, here_N in found if (here_N & bad_N).any()] or [np.zeros(1)]))
    shown = ", ".join(f"{v:.4g}" for v in values[:3]) + (", ..." if len(values) > 3 else "")
    rows = sample.rows_of(bad_N)
    return Finding(
        "placeholder",
        0.999,
        describe(sample, rows, bad_N),
        f"The {' and '.join(sides)} log-prob is exactly {shown} at {bad_N.sum()} tokens ({place}) where the other side "
        "disagrees far beyond what it does for tokens of nearly that value.",
        "Somebody filled these in (appended EOS, truncation, an API's default): take the engine's own value, or mark the "
        "token missing and out of the loss.",
        rows,
    )
