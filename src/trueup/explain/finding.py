"""One named cause of the gap, as the verdict reports it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

CAUSES = (
    "precision",
    "quantised",
    "temperature",
    "truncated-support",
    "misaligned",
    "placeholder",
    "missing",
    "weights",
    "cache",
    "retokenised",
    "observation",
    "prompt",
    "unknown",
)
FLOORS = ("precision", "quantised")
ROWS_LISTED = 10_000
"""Row numbers listed in the report; a cause that holds in more rows says how many in `where`."""


@dataclass
class Finding:
    cause: str
    confidence: float
    """1 - p of the test that named it, after Holm's correction; for choices between kinds, lower (docs/explain.md)."""
    where: str
    evidence: str
    remedy: str
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Row numbers in the order of the files, from 0."""
    share: float = 0.0
    """Of the summed |log rho|, or of the tokens where nothing can be compared."""

    def as_dict(self) -> dict:
        return {
            "cause": self.cause,
            "confidence": round(float(self.confidence), 4),
            "share": round(float(self.share), 4),
            "rows": [int(row) for row in np.sort(self.rows)[:ROWS_LISTED]],
            "where": self.where,
            "evidence": self.evidence,
            "remedy": self.remedy,
        }
