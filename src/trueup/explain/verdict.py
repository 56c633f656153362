"""From dump to verdict: one pass over the files, then the signatures in order, each on what the earlier ones left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trueup.explain.alignment import bursts, shifted
from trueup.explain.columns import parse_columns
from trueup.explain.difference import other_logits, unbalanced
from trueup.explain.distribution import temperature, truncated_support
from trueup.explain.dump import expand, read_batches
from trueup.explain.finding import FLOORS, Finding
from trueup.explain.floor import floor
from trueup.explain.sample import Sample, Sampler
from trueup.explain.statistics import Statistics
from trueup.explain.values import constants, missing

SCHEMA = 1


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
    findings = find_causes(sample, tokenizer)
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
    size_N = np.minimum(np.abs(sample.log_rho_N), 20.0)
    total = float(size_N.sum()) or 1.0
    scored = max(int(sample.mask_N.sum()), 1)
    comparable = 1 - float((sample.mask_N & ~sample.known_N).sum()) / scored
    left = 1.0

    def take(finding: Finding | None, claimed_before: np.ndarray) -> None:
        nonlocal left
        if finding is None:
            return
        newly_N = sample.claimed_N & ~claimed_before
        if newly_N.any():
            finding.share = float(size_N[newly_N].sum()) / total
        else:
            finding.share *= left
        left = max(0.0, left - finding.share)
        again = next((other for other in found if other.cause == finding.cause), None)
        if again is None:
            found.append(finding)
        else:  # two signatures of one cause: one row, with the words of the first
            again.share += finding.share
            again.rows = np.union1d(again.rows, finding.rows)

    absent = missing(sample)
    before = sample.claimed_N.copy()
    values = constants(sample)
    claimed = before
    for finding in values:
        own_N = sample.known_N & np.isin(sample.row_N, finding.rows) & sample.claimed_N & ~claimed
        finding.share = float(size_N[own_N].sum()) / total
        left = max(0.0, left - finding.share)
        claimed = claimed | own_N
        found.append(finding)
    for signature in (shifted, bursts):
        before = sample.claimed_N.copy()
        take(signature(sample), before)
    before = sample.claimed_N.copy()
    for signature in (temperature, truncated_support, other_logits, unbalanced):
        finding = signature(sample)
        take(finding, before)
        if finding is not None:
            break  # These four explain the same tokens; the more specific comes first (docs/explain.md).
    if tokenizer is not None:
        from trueup.explain.retokenise import prove

        prove(sample, tokenizer, found)
    ground = floor(sample, found)
    ground.share = left
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
