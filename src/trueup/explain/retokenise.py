"""`--tokenizer`: prove `retokenised` by decoding the responses and encoding them again."""

from __future__ import annotations

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.sample import Sample

RESPONSES_TRIED = 512


def prove(sample: Sample, tokenizer: str, findings: list[Finding]) -> None:
    """Adds to a `retokenised` finding how many of its responses change when decoded and encoded, and of the others.

    A response whose ids survive the round trip cannot have been scored as other tokens by it: the finding is proved when
    the responses it names change and the rest do not, and withdrawn (kept as a suspicion) when none of them change.
    """
    if sample.ids_N is None:
        raise ValueError("--tokenizer needs response_ids in the dump; name them with --columns response_ids=THEIR_NAME")
    from transformers import AutoTokenizer

    encoder = AutoTokenizer.from_pretrained(tokenizer)
    for finding in (f for f in findings if f.cause == "retokenised"):
        named = finding.rows[:RESPONSES_TRIED]
        others = np.setdiff1d(np.arange(len(sample.lengths)), finding.rows)[:RESPONSES_TRIED]
        changed, changed_others = (_changed(sample, rows, encoder) for rows in (named, others))
        finding.evidence += (
            f" Decoded and encoded again, {changed} of {len(named)} of these responses become other tokens, "
            f"and {changed_others} of {len(others)} of the others."
        )
        finding.confidence = 0.99 if changed > 0.5 * len(named) else 0.5


def _changed(sample: Sample, rows: np.ndarray, encoder) -> int:
    count = 0
    for row in rows:
        ids = sample.ids_N[sample.offsets[row] : sample.offsets[row + 1]].tolist()
        count += encoder.encode(encoder.decode(ids), add_special_tokens=False) != ids
    return count
