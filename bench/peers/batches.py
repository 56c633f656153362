"""The batches that every peer and trueup are given, and trueup's side of the comparison.

Shapes: B responses of up to T tokens, padded on the right, float32 as the peers have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup.correction import correct, preset
from trueup.objectives import Objective, policy_loss, token_weights
from trueup.rollouts import offsets_of

CASES = ("bf16", "int8", "broken", "adversarial")
B, T = 8, 24


@dataclass(frozen=True)
class Batch:
    mu: Tensor
    """[B, T] sampler log-probs."""
    pi: Tensor
    """[B, T] learner log-probs at the delivered weights."""
    theta: Tensor
    """[B, T] learner log-probs at the weights of the update."""
    mask: Tensor
    """bool [B, T], tokens that the policy chose; false at padding and at tool output."""
    lengths: Tensor
    """int64 [B]."""
    advantages: Tensor
    """[B], of both signs."""

    def at_first_update(self) -> Batch:
        """The same where the learner has not moved yet: peers that recompute their weights at pi_theta then agree."""
        return replace(self, theta=self.pi)


@dataclass(frozen=True)
class Result:
    weights: Tensor
    """[B, T], what a token's loss is multiplied by; 0 where it was dropped."""
    losses: dict[str, float]
    """By aggregation."""
    gradients: dict[str, Tensor]
    """[B, T] of each loss with respect to theta."""


def batch(case: str, seed: int) -> Batch:
    """bf16, int8: mismatch of the size measured there. broken: log rho ~ N(0, 1). adversarial: ratios from e^-19 to e^19,
    probabilities next to 0 and 1, a response of one token, one that agrees exactly."""
    make = torch.Generator().manual_seed(1000 * CASES.index(case) + seed)
    normal = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    lengths = torch.randint(2, T + 1, (B,), generator=make)
    lengths[0], lengths[1] = T, 1
    spread = {"bf16": 0.02, "int8": 0.1, "broken": 1.0, "adversarial": 0.3}[case]
    mu = -torch.rand(B, T, generator=make) * 4 - 1e-3
    log_rho = spread * normal(B, T) * (1 + 4 * (torch.rand(B, T, generator=make) < 0.05))
    if case == "adversarial":
        extreme = torch.rand(B, T, generator=make) < 0.15
        mu = torch.where(extreme, -20.0, mu)
        log_rho = torch.where(extreme, (torch.rand(B, T, generator=make) * 2 - 1) * 19, log_rho)
        mu[2, : T // 2] = -1e-7
        log_rho[3] = 0
    pi = (mu + log_rho).clamp(max=-1e-8)
    theta = (pi + 0.15 * normal(B, T)).clamp(max=-1e-8)
    inside = torch.arange(T) < lengths[:, None]
    tool = torch.rand(B, T, generator=make) < 0.1
    mask = inside & ~tool
    mask[torch.arange(B), 0] = True  # no response without a token of the policy's own
    return Batch(mu, pi, theta, mask, lengths, normal(B))


def ours(name: str, given: Batch, kind: str = "ppo", dual_clip: float | None = None) -> Result:
    """trueup's weights, and its loss with its gradient for the two aggregations that the peers share."""
    correction = preset(name)
    offsets = offsets_of(given.mask.sum(1))
    mu_N, pi_N = given.mu[given.mask], given.pi[given.mask]
    advantages_N = given.advantages[:, None].expand(B, T)[given.mask]
    found = correct(correction, mu_N, pi_N, offsets, None, advantages_N)
    losses, gradients = {}, {}
    for aggregation in ("token-mean", "sequence-mean"):
        theta_N = given.theta[given.mask].requires_grad_()
        anchor_N = mu_N if correction.anchor == "sampler" else pi_N
        objective = Objective(kind=kind, dual_clip=dual_clip)
        loss_N, _ = policy_loss(objective, theta_N, anchor_N, advantages_N, found.weights_N, offsets, found.keep_N)
        dropped_stay = correction.dropped_in_denominator
        weight_N, denominator = token_weights(aggregation, found.keep_N, found.valid_N, offsets, dropped_stay)
        loss = (weight_N * loss_N).sum() / (denominator or math.nan)  # trueup skips an update without any token
        (gradient_N,) = torch.autograd.grad(loss, theta_N)
        losses[aggregation] = float(loss.detach())
        gradients[aggregation] = torch.zeros(B, T).masked_scatter(given.mask, gradient_N)
    return Result(torch.zeros(B, T).masked_scatter(given.mask, found.weights_N), losses, gradients)
