"""The update: scored rollouts and advantages in, better weights out, the same whatever the micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trueup.advantages import (
    gae,
    group_relative,
    overlong_penalty,
    per_token,
    place_terminal_reward,
    reinforce_plus_plus,
    rloo,
    whiten,
)
from trueup.config import RunConfig
from trueup.correction import correct
from trueup.learner.critic import Critic
from trueup.learner.model import Policy, load_causal_lm, micro_batches
from trueup.learner.optimizer import MasterAdamW
from trueup.learner.totals import Totals
from trueup.objectives import explained_variance, kl_penalty, policy_loss, token_weights, value_loss
from trueup.rollouts import Rollouts, token_rows


@dataclass
class Batch:
    """Rollouts with all that the update needs of them. Token vectors are float32 [N]."""

    rollouts: Rollouts
    """`learner_logprobs` is None where the update's own forward gives pi_old (strictly on-policy)."""
    advantages: Tensor
    returns: Tensor | None = None
    """What the critic learns; None without a critic."""
    values: Tensor | None = None
    """The critic's values before the update."""
    reference_logprobs: Tensor | None = None
    """Of the model that training started from; None without a KL penalty."""
    entropy: Tensor | None = None
    """Of the learner's distribution at each token, at the weights of pi_old."""
    stale: bool = False
    """Whether pi_old is of older weights than the policy's: the sampler's were delivered some updates ago."""

    def rows(self, index: Tensor) -> Batch:
        tokens = token_rows(self.rollouts.offsets, index)
        picked = {}
        for name in (field.name for field in fields(self) if field.name not in ("rollouts", "stale")):
            column = getattr(self, name)
            picked[name] = None if column is None else column[tokens]
        return replace(self, rollouts=self.rollouts.rows(index), **picked)


class Learner:
    """Policy, critic and reference with their optimizers."""

    def __init__(self, config: RunConfig):
        self.config = config
        learner = config.learner
        updates = config.steps * config.batch.minibatches * config.batch.epochs
        settings = (learner.dtype, learner.attention, learner.device)
        model = load_causal_lm(config.model, *settings)
        if learner.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.policy = Policy(model, learner.token_budget, learner.chunk)
        self.policy.check_head()
        model.train()  # gradient checkpointing works in no other mode; there is no dropout
        self.optimizer = MasterAdamW(model, learner, updates)
        self.critic = self.critic_optimizer = self.reference = None
        self._delivered: list[Tensor] | None = None
        self._updated_since = False  # whether the policy has moved on from `_delivered`
        if config.advantage.kind == "gae":
            body = load_causal_lm(config.critic.model or config.model, *settings).base_model
            if learner.gradient_checkpointing:
                body.gradient_checkpointing_enable()
            self.critic = Critic(body, learner.token_budget)
            self.critic.module.train()
            self.critic_optimizer = MasterAdamW(self.critic.module, config.critic, updates)
        if config.objective.kl_coefficient:
            reference = load_causal_lm(config.model, *settings).requires_grad_(False)
            self.reference = Policy(reference, learner.token_budget, learner.chunk)

    def keep_delivered(self) -> None:
        """Copy the policy's weights, which go to the sampler now: rollouts that are sampled with them are scored with them,
        however many updates later. Without a call there is no copy, and rollouts are scored with the weights of the moment."""
        weights = [weight.data for weight in self.policy.model.parameters()]
        if self._delivered is None:
            self._delivered = [weight.clone() for weight in weights]
        else:
            torch._foreach_copy_(self._delivered, weights)
        self._updated_since = False

    @contextmanager
    def _as_delivered(self) -> Iterator[None]:
        """Within the block the policy has the weights that were delivered last."""
        if not (self._updated_since and self._delivered):
            yield
            return
        parameters = list(self.policy.model.parameters())
        current = [parameter.data for parameter in parameters]
        try:
            for parameter, delivered in zip(parameters, self._delivered):
                parameter.data = delivered
            yield
        finally:
            for parameter, weight in zip(parameters, current):
                parameter.data = weight

    def prepare(self, rollouts: Rollouts) -> tuple[Batch, dict[str, float]]:
        """Score the rollouts where needed and turn rewards into advantages; also `time/logprobs`."""
        start = time.perf_counter()
        stale = self._delivered is not None and self._updated_since
        batch = Batch(rollouts, advantages=torch.empty(0), stale=stale)
        if stale or not self.config.strictly_on_policy:
            with self._as_delivered():
                rollouts.learner_logprobs, batch.entropy = self.policy.score(rollouts)
        if self.reference is not None:
            batch.reference_logprobs, _ = self.reference.score(rollouts)
        if self.critic is not None:
            batch.values = self.critic.values(rollouts)
        self._advantages(batch)
        return batch, {"time/logprobs": time.perf_counter() - start}

    def _advantages(self, batch: Batch) -> None:
        config, rollouts = self.config, batch.rollouts
        reward_B = rollouts.reward
        if config.reward.overlong_buffer:
            reward_B = reward_B + overlong_penalty(
                rollouts.lengths,
                config.batch.response_length,
                config.reward.overlong_buffer,
                config.reward.overlong_penalty,
            )
        kind = config.advantage.kind
        if kind == "gae":
            rewards_N = place_terminal_reward(reward_B, rollouts.offsets)
            batch.advantages, batch.returns = gae(
                rewards_N, batch.values, rollouts.offsets, config.advantage.gamma, config.advantage.lam
            )
            if config.advantage.whiten:
                batch.advantages = whiten(batch.advantages, rollouts.loss_mask)
            return
        if kind == "rloo":
            advantage_B = rloo(reward_B, rollouts.group)
        elif kind == "reinforce++":
            advantage_B = reinforce_plus_plus(reward_B)
        else:
            advantage_B = group_relative(reward_B, rollouts.group, normalise_std=kind == "grpo")
        batch.advantages = per_token(advantage_B, rollouts.offsets)

    def update(self, batch: Batch, generator: torch.Generator, learn_policy: bool = True) -> dict[str, float]:
        """All epochs and minibatches over one batch. Fills `learner_logprobs` and `entropy` where they were missing.

        learn_policy: false while only the critic warms up. Returns `policy/`, `critic/`, `correction/`, `staleness/` and
        `time/` metrics.
        """
        start = time.perf_counter()
        totals = Totals()
        if batch.rollouts.learner_logprobs is None and not learn_policy:
            batch.rollouts.learner_logprobs, batch.entropy = self.policy.score(batch.rollouts)
        for _ in range(self.config.batch.epochs):
            order = torch.randperm(len(batch.rollouts), generator=generator)
            for index in order.tensor_split(self.config.batch.minibatches):
                if learn_policy:
                    self._update_policy(batch, index, totals)
                if self.critic is not None:
                    self._update_critic(batch, index, totals)
        metrics = {"staleness/kl": 0.0} | totals.metrics()
        if self.critic is not None:
            metrics["critic/explained_variance"] = explained_variance(
                batch.values, batch.returns, batch.rollouts.loss_mask
            )
        return metrics | {"time/update": time.perf_counter() - start}

    def _update_policy(self, batch: Batch, index: Tensor, totals: Totals) -> None:
        """One update by the rows in `index`: gradients of the summed losses, divided by the summed denominators."""
        fresh = batch.rollouts.learner_logprobs is None or batch.entropy is None
        if fresh:
            seen_logprobs, seen_entropy = torch.empty(batch.rollouts.tokens), torch.empty(batch.rollouts.tokens)
        first = batch.stale and not totals.objective  # the policy has not moved yet in this step
        loss_sum = denominator = kept = 0.0
        for rows in micro_batches(batch.rollouts.rows(index), self.config.learner.token_budget):
            part = batch.rows(index[rows])
            logprobs_N, entropy_N = self.policy(part.rollouts)
            if fresh:
                tokens = token_rows(batch.rollouts.offsets, index[rows])
                seen_logprobs[tokens], seen_entropy[tokens] = logprobs_N.detach(), entropy_N.detach()
            if first:
                totals.add_staleness(logprobs_N.detach(), part.rollouts)
            loss, share, kept_here = self._policy_loss(part, logprobs_N, entropy_N, totals)
            loss.backward()
            loss_sum += float(loss.detach())
            denominator += share
            kept += kept_here
        if fresh:
            batch.rollouts.learner_logprobs, batch.entropy = seen_logprobs, seen_entropy
        if not kept:  # every response was rejected: there is nothing to learn from, and Adam's momentum is no reason
            self.optimizer.clear()
            totals.skipped += 1
            return
        norm = self.optimizer.step(denominator)
        self._updated_since = True
        totals.skipped += norm is None
        totals.add("policy/loss", loss_sum / denominator)
        if norm is not None:
            totals.add("policy/grad_norm", norm)

    def _policy_loss(
        self, part: Batch, logprobs_N: Tensor, entropy_N: Tensor, totals: Totals
    ) -> tuple[Tensor, float, float]:
        """Correction and objective of one micro-batch: (summed loss, its denominator, tokens kept)."""
        config, objective, rollouts = self.config, self.config.objective, part.rollouts
        pi_old_N = logprobs_N.detach() if rollouts.learner_logprobs is None else rollouts.learner_logprobs
        begin = time.perf_counter()
        corrected = correct(
            config.correction,
            rollouts.sampler_logprobs,
            pi_old_N,
            rollouts.offsets,
            rollouts.loss_mask,
            part.advantages,
        )
        totals.seconds += time.perf_counter() - begin
        totals.corrections.append(corrected.counts)
        anchor_N = pi_old_N
        if config.correction.anchor == "sampler":
            anchor_N = torch.where(corrected.valid_N, rollouts.sampler_logprobs, logprobs_N.detach())
        loss_N, sums = policy_loss(
            objective,
            logprobs_N,
            anchor_N,
            part.advantages,
            corrected.weights_N,
            rollouts.offsets,
            corrected.keep_N,
        )
        totals.objective.append({name: float(value) for name, value in sums.items()})
        if objective.kl_coefficient:
            penalty_N = kl_penalty(logprobs_N, part.reference_logprobs, objective.kl_estimator)
            loss_N = loss_N + objective.kl_coefficient * penalty_N
            kept_N = corrected.keep_N
            totals.add("policy/kl_reference", float((penalty_N.detach() * kept_N).sum()), int(kept_N.sum()))
        if objective.entropy_coefficient:
            loss_N = loss_N - objective.entropy_coefficient * entropy_N
        weight_N, share = token_weights(
            objective.aggregation,
            corrected.keep_N,
            corrected.valid_N,
            rollouts.offsets,
            config.correction.dropped_in_denominator,
            config.batch.response_length,
        )
        return (weight_N * loss_N).sum(), share, corrected.counts["kept"]

    def _update_critic(self, batch: Batch, index: Tensor, totals: Totals) -> None:
        loss_sum = count = 0.0
        for rows in micro_batches(batch.rollouts.rows(index), self.config.learner.token_budget):
            part = batch.rows(index[rows])
            mask_N = part.rollouts.loss_mask
            loss_N = value_loss(self.critic(part.rollouts), part.values, part.returns, self.config.objective.value_clip)
            loss = (loss_N * mask_N).sum()
            loss.backward()
            loss_sum += float(loss.detach())
            count += int(mask_N.sum())
        if not count:
            self.critic_optimizer.clear()
            return
        norm = self.critic_optimizer.step(count)
        totals.add("critic/loss", loss_sum / count)
        if norm is not None:
            totals.add("critic/grad_norm", norm)

    def _optimizers(self) -> dict[str, MasterAdamW]:
        named = {"policy": self.optimizer, "critic": self.critic_optimizer}
        return {name: optimizer for name, optimizer in named.items() if optimizer is not None}

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides the policy's bf16 weights, by name."""
        return {
            f"{owner}/{name}": value
            for owner, optimizer in self._optimizers().items()
            for name, value in optimizer.state()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for owner, optimizer in self._optimizers().items():
            prefix = f"{owner}/"
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            optimizer.load_state(own)
