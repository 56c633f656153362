"""Says in words which responses, steps and positions a finding concerns."""

from __future__ import annotations

import numpy as np

from trueup.explain.sample import Sample


def describe(sample: Sample, rows: np.ndarray, tokens: np.ndarray | None = None) -> str:
    """`rows` are rows of the sample; `tokens` a mask or indices of its tokens, where only some are concerned."""
    total = len(sample.lengths)
    parts = ["all responses" if len(rows) == total else f"{len(rows)} of {total} responses"]
    step_B, group_B = sample.columns["step"], sample.columns["group"]
    steps, all_steps = np.unique(step_B[rows]), np.unique(step_B)
    if len(all_steps) > 1:
        parts.append("all steps" if len(steps) == len(all_steps) else f"steps {_list(steps)}")
    groups, all_groups = np.unique(group_B[rows]), np.unique(group_B)
    if len(rows) < total and 1 < len(groups) < len(all_groups) and len(groups) <= 40 and groups.max() < 1 << 31:
        parts.append(f"groups {_list(groups)}")
    if tokens is not None and np.any(tokens):
        position = sample.position_N[tokens]
        parts.append(f"positions {int(position.min())} to {int(position.max())}, median {int(np.median(position))}")
    if sample.fraction < 0.999:
        parts.append(f"in a sample of {sample.fraction:.2%} of the dump")
    return "; ".join(parts)


def _list(values: np.ndarray) -> str:
    shown = [str(int(value)) for value in values]
    return ", ".join(shown) if len(shown) <= 20 else f"{shown[0]} to {shown[-1]} ({len(shown)} of them)"
