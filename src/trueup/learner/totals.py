"""What a step's update counts: sums over micro-batches, divided once at the end."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from trueup.correction import add_counts, fractions
from trueup.objectives import policy_stats
from trueup.rollouts import Rollouts


class Totals:
    """Sums over the micro-batches of all updates of a step."""

    def __init__(self):
        self.means: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.objective: list[dict[str, float]] = []
        self.corrections: list[dict[str, float]] = []
        self.skipped = 0
        self.seconds = 0.0

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        self.means[name][0] += total
        self.means[name][1] += count

    def add_staleness(self, logprobs_N: Tensor, rollouts: Rollouts) -> None:
        """k3 of KL(policy as delivered || policy now), over tokens that (but for the mismatch) the former sampled."""
        log_r_N = (logprobs_N - rollouts.learner_logprobs)[rollouts.loss_mask].double().clamp(max=40)
        self.add("staleness/kl", float((torch.expm1(log_r_N) - log_r_N).sum()), len(log_r_N))

    def metrics(self) -> dict[str, float]:
        found = {name: total / count for name, (total, count) in self.means.items() if count}
        if self.objective:
            found |= policy_stats(add_counts(self.objective))
            found |= fractions(add_counts(self.corrections))
        return found | {"policy/skipped_updates": float(self.skipped), "time/correction": self.seconds}
