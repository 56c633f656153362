"""PPO's critic: the value of each prefix before the next response token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trueup.learner.model import micro_batches, response_hidden
from trueup.rollouts import Rollouts, token_rows


class Critic:
    """A language model's body with a scalar head; the head starts at zero, so that early advantages are the rewards."""

    def __init__(self, body: nn.Module, token_budget: int = 16384):
        hidden = body.config.get_text_config().hidden_size
        # The head stays in float32: values are small differences of a few thousand features.
        self.head = nn.Linear(hidden, 1, dtype=torch.float32, device=next(body.parameters()).device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.module = nn.ModuleDict({"body": body, "head": self.head})
        self.token_budget = token_budget

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """Values of one micro-batch, float32 [N] on the CPU; differentiable."""
        hidden_NH = response_hidden(self.module["body"], rollouts)
        return self.head(hidden_NH.float())[:, 0].cpu()

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Tensor:
        """Values of any number of rollouts, float32 [N] on the CPU."""
        values_N = torch.empty(rollouts.tokens)
        for rows in micro_batches(rollouts, self.token_budget):
            values_N[token_rows(rollouts.offsets, rows)] = self(rollouts.rows(rows))
        return values_N
