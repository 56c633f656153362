"""From dump to verdict: one pass over the files, then the signatures in order, each on what the earlier ones left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trueup.explain.alignment import bursts, shifted
from trueup.explain.columns import parse_columns
from trueup.explain.difference import other_logits, unbalanced
from trueup.explain.distribution import temperature, truncated_support
from trueup.explain.dump import expand, read_batches
from trueup.explain.engines import explain_engines
from trueup.explain.finding import FLOORS, Finding
from trueup.explain.floor import floor
from trueup.explain.sample import Sample, Sampler
from trueup.explain.statistics import Statistics
from trueup.explain.values import constants, missing

SCHEMA = 1
ROWS_LEFT = 8
"""Responses that another look needs."""


def explain(
    dumps: list[str],
    columns: str | None = None,
    tokenizer: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict:
    """The verdict over all files: {"schema", "healthy", "causes", "stats"}, ready for JSON.

    `progress` is called with the tokens of each batch. Raises ValueError or FileNotFoundError on a dump that cannot be read.
    """
    statistics, sampler = scan(dumps, columns, progress)
    sample = sampler.sample()
    findings = explain_engines(sample, lambda part: find_causes(part, tokenizer))
    return {
        "schema": SCHEMA,
        "healthy": all(finding.cause in FLOORS for finding in findings),
        "causes": [finding.as_dict() for finding in findings],
        "stats": statistics.as_dict() | {"sample_fraction": sample.fraction},
    }


def scan(dumps, columns=None, progress=None) -> tuple[Statistics, Sampler]:
    """One pass over all files."""
    mapping, preset = parse_columns(columns)
    statistics, sampler = Statistics(), Sampler()
    for batch in read_batches(expand(dumps), mapping, preset):
        row_N = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        known_N = batch.mask_N & np.isfinite(batch.sampler_N) & np.isfinite(batch.learner_N)
        if known_N.all():
            statistics.add(batch, known_N, batch.sampler_N, batch.learner_N, row_N)
        else:
            statistics.add(batch, known_N, batch.sampler_N[known_N], batch.learner_N[known_N], row_N[known_N])
        sampler.add(batch)
        if progress is not None:
            progress(int(batch.offsets[-1]))
    return statistics, sampler


def find_causes(sample: Sample, tokenizer: str | None = None) -> list[Finding]:
    """All causes, largest share first, the floor among them. Shares add up to 1."""
    found: list[Finding] = []
    scored = max(int(sample.mask_N.sum()), 1)
    comparable = 1 - float((sample.mask_N & ~sample.known_N).sum()) / scored
    absent = missing(sample)
    for signature in (constants, shifted, bursts):
        before_N = sample.claimed_N.copy()
        findings = signature(sample) or []
        for finding in findings if isinstance(findings, list) else [findings]:
            claimed_N = sample.claimed_N & ~before_N
            if isinstance(findings, list):
                claimed_N &= np.isin(sample.row_N, finding.rows)
            finding.share = sample.mass(claimed_N)
            before_N |= claimed_N
            _add(found, finding)
    for finding in _distributions(sample):
        _add(found, finding)
    if tokenizer is not None:
        from trueup.explain.retokenise import prove

        prove(sample, tokenizer, found)
    ground = floor(sample, found)
    ground.share = max(0.0, 1 - sum(finding.share for finding in found))
    found.append(ground)
    for finding in found:
        finding.share *= comparable
    if absent is not None:
        absent.share = 1 - comparable
        found.append(absent)
    for finding in found:
        finding.rows = sample.number_B[finding.rows]
        finding.confidence = float(np.clip(finding.confidence, 0.5, 0.9999))
    return sorted(found, key=lambda finding: -finding.share)


def _distributions(sample: Sample) -> Iterator[Finding]:
    """Causes that concern whole responses: each claims its responses, and what is left is looked at again.

    In one response they explain the same tokens, so the first that holds is named, the more specific first
    (docs/explain.md); in other responses, or steps, another may hold.
    """
    signatures = [temperature, truncated_support, other_logits, unbalanced]
    if len(sample.rows_of(sample.known_N & ~sample.claimed_N)) * 2 < len(sample.lengths):
        return  # Most responses are scored at other positions; in the rest the same may hold, too little to be proved.
    while signatures:
        finding = next((finding for finding in (signature(sample) for signature in signatures) if finding), None)
        if finding is None:
            return
        yield finding
        sample.claimed_N |= sample.known_N & np.isin(sample.row_N, finding.rows)
        if len(sample.rows_of(sample.free())) < ROWS_LEFT:
            return
        # E[rho] of responses that were picked by their gap is not 1, so `unbalanced` cannot be asked again.
        used = {"temperature": temperature, "truncated-support": truncated_support}.get(finding.cause, other_logits)
        signatures = [signature for signature in signatures if signature not in (used, unbalanced)]


def _add(found: list[Finding], finding: Finding) -> None:
    again = next((other for other in found if other.cause == finding.cause), None)
    if again is None:
        found.append(finding)
    else:  # two signatures of one cause: one row, with the words of the first
        again.share += finding.share
        again.rows = np.union1d(again.rows, finding.rows)
