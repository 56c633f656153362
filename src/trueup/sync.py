"""Delivery: getting the learner's weights into the sampler, and the proof that they arrived.

A fixed canary batch is scored on both sides after every delivery. Three questions are asked of it:

- Do sampler and learner agree as well as they did at step 0? The mean |pi - mu| of each sequence's fixed tokens is
  divided by the null calibrated there (same weights, same precision). A geometric mean of these ratios above 2, and
  above 1 by four standard errors over sequences, is a stop.
- Did the sampler move with the learner? If its log-probs are the same to the last bit while the learner's moved, nothing
  landed, however small the update. Once the learner has moved well beyond the null's noise, `arrived` says how much of
  its change since step 0 the sampler shows: the slope of log mu's change on log pi's, 1 when everything landed.
- Are prefixes recomputed? The canary's continuations, decoded from prefixes that were cached under the weights before,
  must agree with the sampler's own prefill, which reads no cache. No precision enters: the null is almost zero.

What this cannot see: a layer that is withheld shows only once its missing updates move the canary by about the null.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trueup.learner.model import Policy
from trueup.quantize import StepMeter, linear_weights
from trueup.rollouts import Rollouts, offsets_of, pack, segment_ids, segment_sum
from trueup.samplers.base import Sampler, Sampling

_LEAST_PROBABILITY = 1e-3  # tokens both sides call impossible say little of the weights, at enormous |log rho|
_POWER = 8.0  # the slope is asked for once the learner's squared change is this many times the noise: it then errs by 1/9
_ARRIVED = 0.75  # a slope that is surely below this is no noise
_FLOOR = 5e-4  # mean |pi - mu| that matters to nobody, a fifth of what bf16 shows: added to both sides of every ratio
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
        self._task_prompts = prompts
        self._longest = context - tokens - 1
        self._canary: list[list[int]] = []  # made when the sampler first holds weights
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
            self.sampler.generate(self._canary, self._sampling)  # caches the canary's prefixes under the old weights
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
        null = {f"null/{what}": value_B for what, value_B in self._null.items()}
        first = {f"first/{field.name}": getattr(self._first, field.name) for field in fields(Canary)}
        lengths = torch.tensor([len(ids) for ids in self._canary])
        return null | first | {"canary/ids": pack(self._canary, torch.int64), "canary/lengths": lengths}

    def load_state(self, state: dict[str, Tensor]) -> None:
        if not state:
            return
        self._null = {what: state[f"null/{what}"] for what in ("weights", "cache")}
        self._first = Canary(**{field.name: state[f"first/{field.name}"] for field in fields(Canary)})
        self._canary = [ids.tolist() for ids in state["canary/ids"].split(state["canary/lengths"].tolist())]

    def _proof(self, version: int) -> dict[str, float]:
        if self.sampler.version != version:
            raise DeliveryError(f"the sampler says it holds version {self.sampler.version}, {version} was delivered")
        self._canary = self._canary or self._make_canary()
        canary = self._score()
        weights_B = _prob_diff(canary.fixed_mu, canary.fixed_pi, canary.fixed_offsets)
        cache_B = _prob_diff(canary.decoded_mu, canary.prefill_mu, canary.decoded_offsets)
        log_rho = canary.decoded_pi - canary.decoded_mu
        metrics = {
            "delivery/canary_kl": float((log_rho.exp() - 1 - log_rho).mean()),
            "delivery/canary_prob_diff": float(weights_B.mean()),
            "delivery/cache_prob_diff": float(cache_B.mean()),
        }
        if not (weights_B.isfinite().all() and cache_B.isfinite().all()):
            raise DeliveryError(f"after delivering version {version} the sampler's log-probs are not finite")
        if self._first is None:
            if weights_B.mean() > _ABSURD:
                raise DeliveryError(
                    f"sampler and learner disagree before training: mean |pi - mu| {weights_B.mean():.3f} on the canary "
                    f"batch, where {self.sampler.engine} should show about 0.01 or less. The first delivery did not land, "
                    "or the engine does not implement this architecture as transformers does"
                )
            self._first = self._moved = canary
            self._null = {"weights": weights_B, "cache": cache_B}
            return metrics
        arrived = self._check_movement(canary, version)
        if arrived is not None:
            metrics["delivery/arrived"] = arrived
        self._check_null("weights", weights_B, version)
        self._check_null("cache", cache_B, version)
        return metrics

    def _make_canary(self) -> list[list[int]]:
        """Prompts with the model's own answers: text on which its probabilities are what they are in training.

        Where the context has room for a block of the prefix cache and more, sequences are stretched beyond one block by
        those that follow: only whole blocks are cached, and only then can a stale one show.
        """
        answers = self.sampler.generate(self._task_prompts, Sampling(max_tokens=32, stop_token_ids=(), seed=0))
        whole = [list(map(int, prompt)) + answers.response(row).tolist() for row, prompt in enumerate(self._task_prompts)]
        least = self.sampler.prefix_block + 1
        if least <= self._longest:
            whole = [_stretch(whole, row, max(least, len(ids))) for row, ids in enumerate(whole)]
        return [ids[: self._longest] for ids in whole]

    def _score(self) -> Canary:
        decoded = self.sampler.generate(self._canary, self._sampling)
        # Everything after the first token counts as response, so that one prefill scores fixed and decoded tokens.
        whole = Rollouts.from_lists(
            [ids[:1] for ids in self._canary],
            [ids[1:] + decoded.response(row).tolist() for row, ids in enumerate(self._canary)],
        )
        mu, pi = self.sampler.score(whole), self.policy.score(whole)[0]
        fixed_B = torch.tensor([len(ids) - 1 for ids in self._canary])
        row_N = segment_ids(whole.offsets)
        fixed_N = torch.arange(whole.tokens) - whole.offsets[:-1][row_N] < fixed_B[row_N]
        return Canary(
            mu[fixed_N],
            pi[fixed_N],
            decoded.sampler_logprobs,
            mu[~fixed_N],
            pi[~fixed_N],
            offsets_of(fixed_B),
            decoded.offsets,
        )

    def _check_movement(self, canary: Canary, version: int) -> float | None:
        """The share of the learner's change since step 0 that the sampler shows, once that can be told."""
        first, floor = self._first, torch.tensor(_LEAST_PROBABILITY).log()
        noise = (first.fixed_pi - first.fixed_mu).abs().mean()
        if self._moved is None or not torch.equal(canary.fixed_mu, self._moved.fixed_mu):
            self._moved = canary
        elif (since := (canary.fixed_pi - self._moved.fixed_pi).abs().mean()) > 0.1 * noise:
            raise DeliveryError(
                f"version {version} did not land: the sampler's log-probs of the canary batch are the same to the last "
                f"bit as before, while the learner's moved by {since:.2g} on average. It still holds older weights"
            )
        seen = (first.fixed_pi > floor) & (canary.fixed_pi > floor)
        pi_change, mu_change = (canary.fixed_pi - first.fixed_pi)[seen], (canary.fixed_mu - first.fixed_mu)[seen]
        power, null = float(pi_change.square().sum()), float((first.fixed_pi - first.fixed_mu)[seen].square().sum())
        if power <= _POWER * null:
            return None
        slope = float((mu_change * pi_change).sum()) / power
        error = float(((mu_change - slope * pi_change) * pi_change).square().sum().sqrt()) / power
        if slope + 4 * error < _ARRIVED:
            raise DeliveryError(
                f"version {version} did not land: since step 0 the sampler moved by {slope:.0%} (+-{error:.0%}) of what the "
                "learner moved on the canary batch. Weights are stale, or many of them are never delivered"
            )
        return slope

    def _check_null(self, what: str, value_B: Tensor, version: int) -> None:
        null_B = self._null[what]
        log_ratio_B = ((value_B + _FLOOR) / (null_B + _FLOOR)).log()
        ratio, error = log_ratio_B.mean().exp(), log_ratio_B.std() / len(log_ratio_B) ** 0.5
        if ratio <= 2 or log_ratio_B.mean() <= 4 * error:
            return
        if what == "cache":
            reason = (
                "continuations decoded through the prefix cache disagree with a fresh prefill of the same tokens: "
                "prefixes computed under older weights are still in use. Reset the cache when weights are loaded"
            )
        else:
            reason = "sampler and learner disagree on the canary batch: part of the weights did not land"
        raise DeliveryError(
            f"delivery of version {version} failed: {reason}. Mean probability difference {value_B.mean():.4f}, "
            f"at step 0 {null_B.mean():.4f} (engine {self.sampler.engine})"
        )


def _stretch(prompts: Sequence[Sequence[int]], start: int, length: int) -> list[int]:
    """Prompts one after another, from `start` on and round again, until there are `length` tokens."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.extend(map(int, prompts[start % len(prompts)]))
        start += 1
    return tokens[:length]


def _prob_diff(log_a: Tensor, log_b: Tensor, offsets: Tensor) -> Tensor:
    """Mean |a - b| of probabilities in each sequence, [B]."""
    return segment_sum((log_a.exp() - log_b.exp()).abs(), offsets) / offsets.diff()
