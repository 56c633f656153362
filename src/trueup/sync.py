"""Delivery: getting the learner's weights into the sampler, and the proof that they arrived.

A fixed canary batch is scored on both sides after every delivery. Three questions are asked of it:

- Do sampler and learner agree as well as they did at step 0? The mean |pi - mu| of the canary's fixed tokens must stay
  inside the null calibrated there (same weights, same precision): at most twice the null plus four standard errors,
  clustered by sequence.
- Did the sampler move with the learner? `arrived` is the slope of log mu's change since step 0 on log pi's. It averages
  over all canary tokens, so it sees an update far smaller than the per-token noise of int8: 1 when everything landed,
  0 when nothing did. Below 0.5 by four standard errors, or bit-identical while the learner moved, is a stop.
- Are prefixes recomputed? The canary's continuations, decoded from prefixes that were cached under the weights before,
  must agree with the sampler's own prefill, which reads no cache. No precision enters: the null is almost zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trueup.learner.model import Policy
from trueup.quantize import StepMeter, linear_weights
from trueup.rollouts import Rollouts, segment_ids, segment_sum
from trueup.samplers.base import Sampler, Sampling

_LEAST_PROBABILITY = 1e-3  # tokens both sides call impossible say little of the weights, at enormous |log rho|
_FLOOR = 1e-3  # mean |pi - mu| that matters to nobody: a third of what bf16 shows anyway
_ABSURD = 0.1  # mean |pi - mu| that no precision explains: bf16 shows 0.003, int8 0.01, aggressive 4-bit 0.05


class DeliveryError(RuntimeError):
    """The sampler does not hold the weights it should; training on would be off-policy without saying so."""


@dataclass(frozen=True)
class Canary:
    """One scoring of the canary batch: fixed tokens first, then what the sampler continued them by."""

    fixed_mu: Tensor
    fixed_pi: Tensor
    decoded_mu: Tensor
    """Of the continuation, as decoded through the prefix cache."""
    prefill_mu: Tensor
    """Of the continuation, prefilled without a cache."""
    decoded_pi: Tensor
    fixed_offsets: Tensor
    decoded_offsets: Tensor


class Delivery:
    """Delivers the policy's weights to the sampler, counts versions, and proves each delivery on a canary batch."""

    def __init__(
        self, policy: Policy, sampler: Sampler, prompts: Sequence[Sequence[int]], *, context: int, tokens: int, prove: bool
    ):
        """prompts: what the canary is made from, one sequence each. tokens: how far each is continued."""
        self.policy = policy
        self.sampler = sampler
        self.prove = prove
        # One cached block and a bit, so that a stale prefix cache would show; never longer than the context allows.
        length = max(2, min(max(sampler.prefix_block + 1, 48), context - tokens - 1))
        self._prompts = [_stretch(prompts, start, length) for start in range(len(prompts))]
        self._sampling = Sampling(max_tokens=tokens, stop_token_ids=(), seed=0)
        self._quantised = linear_weights(policy.model) if sampler.engine.endswith("int8") else set()
        self._meter = StepMeter()
        self._first: Canary | None = None
        self._moved: Canary | None = None  # the last canary at which the sampler's log-probs had changed

    def deliver(self, version: int) -> dict[str, float]:
        """Load the weights as `version`, prove that they arrived, return `delivery/...` metrics and `time/delivery`.

        Raises DeliveryError naming what did not land.
        """
        start = time.perf_counter()
        metrics = {}
        if self._quantised and (below := self._meter.measure(self.policy.weights(), self._quantised)) is not None:
            metrics["delivery/below_step_fraction"] = below
        if self.prove and self._first is not None and self.sampler.prefix_block:
            self.sampler.generate(self._prompts, self._sampling)  # caches the canary's prefixes under the old weights
        self.sampler.load(self.policy.weights(), version)
        metrics["time/load"] = time.perf_counter() - start
        if self.prove:
            metrics |= self._proof(version)
        metrics["time/delivery"] = time.perf_counter() - start
        return metrics

    def state(self) -> dict[str, Tensor]:
        """The null and the canary of step 0, so that a resumed run is held to the same standard."""
        if self._first is None:
            return {}
        null = {f"null/{what}": torch.tensor(values, dtype=torch.float64) for what, values in self._null.items()}
        return null | {f"first/{field.name}": getattr(self._first, field.name) for field in fields(Canary)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        if not state:
            return
        self._null = {what: tuple(state[f"null/{what}"].tolist()) for what in ("weights", "cache")}
        self._first = Canary(**{field.name: state[f"first/{field.name}"] for field in fields(Canary)})

    def _proof(self, version: int) -> dict[str, float]:
        if self.sampler.version != version:
            raise DeliveryError(f"the sampler says it holds version {self.sampler.version}, {version} was delivered")
        canary = self._score()
        difference, error = _prob_diff(canary.fixed_mu, canary.fixed_pi, canary.fixed_offsets)
        cache, cache_error = _prob_diff(canary.decoded_mu, canary.prefill_mu, canary.decoded_offsets)
        log_rho = canary.decoded_pi - canary.decoded_mu
        metrics = {
            "delivery/canary_kl": float((log_rho.exp() - 1 - log_rho).mean()),
            "delivery/canary_prob_diff": difference,
            "delivery/cache_prob_diff": cache,
        }
        if not all(map(torch.isfinite, (torch.tensor(difference), torch.tensor(cache)))):
            raise DeliveryError(f"after delivering version {version} the sampler's log-probs are not finite")
        if self._first is None:
            if difference > _ABSURD:
                raise DeliveryError(
                    f"sampler and learner disagree before training: mean |pi - mu| {difference:.3f} on the canary batch, "
                    f"where {self.sampler.engine} should show about 0.01 or less. The first delivery did not land, or the "
                    "engine does not implement this architecture as transformers does"
                )
            self._first = self._moved = canary
            self._null = {"weights": (difference, error), "cache": (cache, cache_error)}
            return metrics
        metrics["delivery/arrived"] = arrived = self._check_movement(canary, version)
        self._check_null("weights", difference, error, version, f" ({arrived:.0%} of the learner's change arrived)")
        self._check_null("cache", cache, cache_error, version)
        return metrics

    def _score(self) -> Canary:
        decoded = self.sampler.generate(self._prompts, self._sampling)
        # Everything after the first token counts as response, so that one prefill scores fixed and decoded tokens.
        whole = Rollouts.from_lists(
            [prompt[:1] for prompt in self._prompts],
            [prompt[1:] + decoded.response(row).tolist() for row, prompt in enumerate(self._prompts)],
        )
        mu, pi = self.sampler.score(whole), self.policy.score(whole)[0]
        place = torch.arange(whole.tokens) - whole.offsets[:-1][segment_ids(whole.offsets)]
        fixed = place < len(self._prompts[0]) - 1
        fixed_offsets = torch.arange(len(whole) + 1) * (len(self._prompts[0]) - 1)
        return Canary(
            mu[fixed], pi[fixed], decoded.sampler_logprobs, mu[~fixed], pi[~fixed], fixed_offsets, decoded.offsets
        )

    def _check_movement(self, canary: Canary, version: int) -> float:
        """The share of the learner's change since step 0 that the sampler shows; raises if it is surely too small."""
        first, floor = self._first, torch.tensor(_LEAST_PROBABILITY).log()
        seen = (first.fixed_pi > floor) & (canary.fixed_pi > floor)
        pi_change, mu_change = (canary.fixed_pi - first.fixed_pi)[seen], (canary.fixed_mu - first.fixed_mu)[seen]
        power = float((pi_change**2).sum())
        slope = float((mu_change * pi_change).sum()) / power if power else 1.0
        residual = mu_change - slope * pi_change
        error = float((residual**2 * pi_change**2).sum().sqrt()) / power if power else 0.0
        noise = (first.fixed_pi - first.fixed_mu).abs().mean()
        if self._moved is None or not torch.equal(canary.fixed_mu, self._moved.fixed_mu):
            self._moved = canary
        elif (since := (canary.fixed_pi - self._moved.fixed_pi).abs().mean()) > 0.1 * noise:
            raise DeliveryError(
                f"version {version} did not land: the sampler's log-probs of the canary batch are the same to the last bit "
                f"as before, while the learner's moved by {since:.2g} on average. The sampler still holds older weights"
            )
        if slope + 4 * error < 0.5:
            raise DeliveryError(
                f"version {version} did not land: since step 0 the sampler moved by {slope:.0%} (+-{error:.0%}) of what the "
                "learner moved on the canary batch. Weights are stale, or many of them are never delivered"
            )
        return slope

    def _check_null(self, what: str, value: float, error: float, version: int, more: str = "") -> None:
        null, null_error = self._null[what]
        limit = max(_FLOOR, 2 * null + 4 * (error**2 + null_error**2) ** 0.5)
        if what == "cache":
            reason = (
                "continuations decoded through the prefix cache disagree with a fresh prefill of the same tokens: "
                "prefixes computed under older weights are still in use. Reset the cache when weights are loaded"
            )
        else:
            reason = f"sampler and learner disagree on the canary batch{more}: part of the weights did not land"
        if value > limit:
            raise DeliveryError(
                f"delivery of version {version} failed: {reason}. Mean probability difference {value:.4f}, "
                f"null at step 0 {null:.4f}, limit {limit:.4f} (engine {self.sampler.engine})"
            )


def _stretch(prompts: Sequence[Sequence[int]], start: int, length: int) -> list[int]:
    """Prompts one after another, from `start` on and round again, until there are `length` tokens."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.extend(map(int, prompts[start % len(prompts)]))
        start += 1
    return tokens[:length]


def _prob_diff(log_a: Tensor, log_b: Tensor, offsets: Tensor) -> tuple[float, float]:
    """Mean |a - b| of probabilities, and its standard error clustered by sequence."""
    difference = (log_a.exp() - log_b.exp()).abs()
    mean_B = segment_sum(difference, offsets) / offsets.diff()
    return float(mean_B.mean()), float(mean_B.std() / len(mean_B) ** 0.5)
