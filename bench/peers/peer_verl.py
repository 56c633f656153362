"""verl's own code: RolloutCorrectionConfig's class methods, the helper that makes weights and masks of them, its losses."""

from __future__ import annotations

import torch
from batches import Batch, Result
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

AGGREGATIONS = {"token-mean": "token-mean", "sequence-mean": "seq-mean-token-mean"}


def presets() -> dict[str, RolloutCorrectionConfig]:
    """Every class method of verl's configuration, by the name that trueup gives it."""
    names = [name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)]
    return {f"verl-{name.replace('_', '-')}": getattr(RolloutCorrectionConfig, name)() for name in names}


def correction_of(config: RolloutCorrectionConfig, given: Batch):
    """(weights or None, response mask after rejection) as verl's trainer computes them."""
    proto, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=given.pi,
        rollout_log_prob=given.mu,
        response_mask=given.mask.long(),
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    return None if proto is None else proto.batch["rollout_is_weights"], mask


def corrected(config: RolloutCorrectionConfig, given: Batch) -> Result:
    """Weights, and the loss of the actor: vanilla PPO at old = pi, or the bypass loss at old = mu."""
    weights, mask = correction_of(config, given)
    applied = weights if weights is not None and not _clips_the_ratio_to_mu(config) else torch.ones_like(given.mu)
    loss_mode = "bypass_mode" if config.bypass_mode else "vanilla"
    actor = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(rollout_correction=config)
    )
    old = given.mu if config.bypass_mode else given.pi
    # Rejected responses have left the mask in decoupled mode; the bypass loss rejects by itself.
    loss_mask = given.mask.long() if config.bypass_mode else mask
    return Result(applied * mask, *_losses(loss_mode, actor, old, given, loss_mask, weights))


def dppo(limit: float, cap: float, given: Batch) -> Result:
    """loss_mode=dppo_tv with its threshold `limit` and its cap on the ratio; weights are those its gradient shows."""
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=limit,
        clip_ratio_high=limit,
        clip_ratio_c=cap,
    )
    losses, gradients = _losses("dppo_tv", actor, given.mu, given, given.mask.long(), None)
    # gradient = -A w / tokens
    weights = -gradients["token-mean"] * given.mask.sum() / given.advantages[:, None]
    return Result(weights, losses, gradients)


def _clips_the_ratio_to_mu(config: RolloutCorrectionConfig) -> bool:
    return config.bypass_mode and config.loss_type == "ppo_clip"


def _losses(loss_mode: str, actor: ActorConfig, old, given: Batch, mask, weights):
    losses, gradients = {}, {}
    for ours, theirs in AGGREGATIONS.items():
        theta = given.theta.clone().requires_grad_()
        advantages = given.advantages[:, None].expand_as(theta)
        loss, _ = get_policy_loss_fn(loss_mode)(old, theta, advantages, mask, theirs, actor, weights)
        (gradients[ours],) = torch.autograd.grad(loss, theta)
        losses[ours] = float(loss.detach())
    return losses, gradients
