"""`--tokenizer`: prove or refute `retokenised` by decoding the responses and encoding them again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.recut import PARTED, Recut, recut
from trueup.explain.sample import Sample
from trueup.explain.significance import binomial_tail
from trueup.explain.where import describe

RESPONSES_TRIED = 64
"""Of those that are suspected, and as many of the others."""
LEVEL = 1e-3
OF_LOGITS = ("cache", "weights", "prompt", "unknown")
"""What re-tokenised responses are taken for where nothing drifts that could be proved without a tokenizer."""
FITTING = 0.2
"""Of the responses looked at, so many must fit the new tokens before one of OF_LOGITS gives way."""


def prove(sample: Sample, tokenizer: str, findings: list[Finding]) -> None:
    """Says of a `retokenised` finding that it is proven or refuted, or adds one that only a tokenizer can prove.

    Proven: at positions that hold another token once the text is encoded again, whole or in pieces, the learner's values
    fit these tokens and not the sampled ones (sign test, the choice of cuts paid for); or they disagree where the round trip
    replaces tokens and hardly elsewhere. Refuted otherwise.
    """
    if sample.ids_N is None:
        raise ValueError("--tokenizer needs response_ids in the dump; name them with --columns response_ids=THEIR_NAME")
    encoder = _load(tokenizer)
    largest = int(sample.ids_N.max(initial=0))
    if largest >= len(encoder):
        raise ValueError(
            f"--tokenizer {tokenizer} has {len(encoder)} tokens, but the dump's response_ids reach {largest}: it is not the "
            "tokenizer of this dump; give that of the model that was trained"
        )
    finding = next((f for f in findings if f.cause == "retokenised"), None)
    named = finding.rows if finding is not None else _parted_rows(sample, findings)
    others = np.setdiff1d(np.arange(len(sample.lengths)), named)
    tried = {row: _recut_row(sample, row, encoder) for row in (*named[:RESPONSES_TRIED], *others[:RESPONSES_TRIED])}
    suspects = {row: tried[row] for row in named[:RESPONSES_TRIED]}
    if not suspects:
        return
    said, proven = _judge(sample, suspects, tried)
    if finding is not None:
        finding.evidence += f" {'Proven' if proven else 'Refuted'} with {tokenizer}: {said}"
        finding.confidence = 0.999 if proven else 0.5
        if not proven:
            finding.remedy = (
                "The learner scored other tokens for another reason than this tokenizer's round trip (another tokenizer, "
                "edited text, spliced or cut ids): compare its input ids with response_ids."
            )
    elif proven and (fits := _fitting(suspects)) and len(fits) >= max(2, FITTING * len(suspects)):
        _take_over(sample, findings, named if len(named) > RESPONSES_TRIED else np.array(fits), said, tokenizer)


def _load(tokenizer: str):
    from transformers import AutoTokenizer

    folder = str(Path(__file__).parents[1] / "assets" / "mini") if tokenizer == "mini" else tokenizer
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--tokenizer {tokenizer}: no tokenizer can be loaded from there ({str(error).splitlines()[0]}); give the folder or "
            "hub name of the model that was trained"
        ) from None


def _parted_rows(sample: Sample, findings: list[Finding]) -> np.ndarray:
    """Responses that OF_LOGITS name, with three or more tokens whose two values part, those with most first."""
    named = [f.rows for f in findings if f.cause in OF_LOGITS]
    if not named:
        return np.empty(0, np.int64)
    parted_N = sample.known_N & (np.abs(sample.log_rho_N) > PARTED)
    count_B = np.bincount(sample.row_N[parted_N], minlength=len(sample.lengths))
    order = np.argsort(-count_B, kind="stable")
    return order[(count_B[order] >= 3) & np.isin(order, np.concatenate(named))]


def _recut_row(sample: Sample, row: int, encoder) -> Recut:
    part = slice(sample.offsets[row], sample.offsets[row + 1])
    known_T = sample.known_N[part]
    mu_T, pi_T = (np.where(known_T, side[part], np.nan) for side in (sample.sampler_N, sample.learner_N))
    return recut(sample.ids_N[part].tolist(), mu_T, pi_T, encoder)


def _judge(sample: Sample, suspects: dict[int, Recut], tried: dict[int, Recut]) -> tuple[str, bool]:
    """-> what was found, and whether it is proof."""
    whole = sum(found.changed for found in suspects.values())
    said = f"encoded again as a whole, {whole} of {len(suspects)} responses become other tokens"
    if fitting := [suspects[row] for row in _fitting(suspects)]:
        wins, losses = (sum(getattr(found, name) for found in fitting) for name in ("wins", "losses"))
        pieces = sum(found.cuts > 0 for found in fitting)
        how = f" ({pieces} of them in pieces)" if pieces else ""
        return (
            f"{said}. In {len(fitting)}, encoded again{how}, the learner's values fit the new tokens, at {wins} of "
            f"{wins + losses} positions that tell; the first other token stands at position "
            f"{int(np.median([found.first for found in fitting]))} (median).",
            True,
        )
    inside, hits_in, outside, hits_out = _substituted(sample, tried)
    if hits_in and binomial_tail(hits_in, inside, max(hits_out, 1) / max(outside, 1)) < LEVEL:
        return (
            f"{said}. The two values part at {hits_in} of the {inside} tokens that this replaces, and at {hits_out} of "
            f"{outside} others.",
            True,
        )
    return f"{said}, and neither this nor any cut of the text makes the learner's values fit.", False


def _fitting(suspects: dict[int, Recut]) -> list[int]:
    """Responses that are proven, each for itself (Bonferroni)."""
    return [int(row) for row, found in suspects.items() if _log_p(found) < math.log(LEVEL / len(suspects))]


def _log_p(found: Recut) -> float:
    """Of the sign test in one response, the choice of cuts paid for."""
    tells = found.wins + found.losses
    return math.log(max(binomial_tail(found.wins, tells, 0.5), 1e-300)) + found.tried if tells else 0.0


def _substituted(sample: Sample, tried: dict[int, Recut]) -> tuple[int, int, int, int]:
    """Tokens that the whole round trip replaces and those where the values part among them; the same of all others."""
    inside = hits_in = outside = hits_out = 0
    for row, found in tried.items():
        start = int(sample.offsets[row])
        part = slice(start, int(sample.offsets[row + 1]))
        hit_T = sample.known_N[part] & (np.abs(sample.log_rho_N[part]) > PARTED)
        low, high = found.substituted
        inside, hits_in = inside + high - low, hits_in + int(hit_T[low:high].sum())
        outside, hits_out = outside + len(hit_T) - high + low, hits_out + int(hit_T.sum() - hit_T[low:high].sum())
    return inside, hits_in, outside, hits_out


def _take_over(sample: Sample, findings: list[Finding], rows: np.ndarray, said: str, tokenizer: str) -> None:
    """Add the finding; what was said of the same responses, for want of a tokenizer, gives way to it."""
    share = sample.mass(np.isin(sample.row_N, rows) & sample.known_N)
    for other in [f for f in findings if f.cause in OF_LOGITS]:
        if np.isin(other.rows, rows).mean() >= 0.8:
            findings.remove(other)
    left = max(0.0, 1 - sum(f.share for f in findings))
    findings.append(
        Finding(
            "retokenised",
            0.999,
            describe(sample, rows),
            f"Proven with {tokenizer}: {said}",
            "Pass the sampler's token ids to the learner; never decode and encode again.",
            rows,
            min(share, left),
        )
    )
