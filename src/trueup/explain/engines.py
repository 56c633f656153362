"""A dump of several engines: each has a floor of its own, so each is explained by itself and the findings are put together.

In one test they would look like replicas of which some hold other weights: int8 beside bf16 is a gap three times as large in
half of the responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from trueup.explain.finding import Finding
from trueup.explain.sample import Sample


def explain_engines(sample: Sample, find: Callable[[Sample], list[Finding]]) -> list[Finding]:
    """`find` on the responses of each engine. Shares are of the whole dump; equal causes become one finding that says where."""
    engine_B = sample.columns["engine"]
    names = np.unique(engine_B)
    if len(names) < 2:
        return find(sample)
    parts = [rows_of_engine(sample, engine_B == name) for name in names]
    gaps = [float(np.minimum(np.abs(part.log_rho_N), 20.0).sum()) for part in parts]
    weights = [gap / (sum(gaps) or 1.0) for gap in gaps] if sum(gaps) else [1 / len(parts)] * len(parts)
    merged: dict[str, Finding] = {}
    for name, part, weight in zip(names, parts, weights):
        for finding in find(part):
            finding.share *= weight
            said = f"{name or 'engine unknown'}: {finding.where}" if finding.where else name or "engine unknown"
            finding.where = said
            if finding.cause not in merged:
                merged[finding.cause] = finding
                continue
            first = merged[finding.cause]
            first.where += f"; {said}"
            first.share += finding.share
            first.confidence = max(first.confidence, finding.confidence)
            first.rows = np.union1d(first.rows, finding.rows)
            if finding.evidence != first.evidence:
                first.evidence += f" {name or 'Engine unknown'}: {finding.evidence}"
    return sorted(merged.values(), key=lambda finding: -finding.share)


def rows_of_engine(sample: Sample, keep_B: np.ndarray) -> Sample:
    """These responses of the sample, nothing claimed."""
    keep_N = keep_B[sample.row_N]
    return replace(
        sample,
        offsets=np.concatenate([[0], np.cumsum(sample.lengths[keep_B])]),
        sampler_N=sample.sampler_N[keep_N],
        learner_N=sample.learner_N[keep_N],
        mask_N=sample.mask_N[keep_N],
        unequal_B=sample.unequal_B[keep_B],
        number_B=sample.number_B[keep_B],
        columns={name: values[keep_B] for name, values in sample.columns.items()},
        ids_N=None if sample.ids_N is None else sample.ids_N[keep_N],
        engine=str(sample.columns["engine"][keep_B][0]),
    )
