"""Delivery: getting the learner's weights into the sampler, and the proof that they arrived.

A fixed canary batch is scored on both sides after every delivery. Three questions are asked of it:

- Do sampler and learner agree as well as they did at step 0? Each sequence's mean |pi - mu| is taken relative to what
  that precision does to the weights of the moment: for int8 and int4, how far the learner moves when it computes in
  simulated int8 or int4, with the scales that were delivered, fresh or frozen; else its mean pi (1 - pi), since an error
  d of a logit moves a probability by p (1 - p) d. A policy that grows less certain, or grows out of frozen scales, shows
  larger differences for the same arithmetic; this divides it out. If the geometric mean over sequences exceeds twice the
  null of step 0, and exceeds it by four standard errors, training stops.
- Did the sampler move with the learner? If its log-probs are the same to the last bit while the learner's moved, nothing
  landed, however small the update. Once the learner has moved well beyond the null's noise, `arrived` says how much of
  its change since step 0 the sampler shows: the slope of log mu's change on log pi's, 1 when everything landed. Scales
  that are frozen cut some of that change; training stops only if the sampler also lacks what simulation says is left.
- Are prefixes recomputed? Continuations decoded from prefixes that were cached under the weights before must agree with
  the sampler's own prefill, which reads no cache. Same engine, same weights: no precision enters.

What this cannot see: a layer that is withheld shows only once its missing updates move the canary by about the null, which
is the larger the coarser the precision.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trueup.learner.model import Policy
from trueup.quantize import StepMeter
from trueup.rollouts import Rollouts, pack, segment_sum
from trueup.samplers.base import Sampler, Sampling
from trueup.samplers.transformers import TransformersSampler

_LEAST_PROBABILITY = 1e-3  # tokens both sides call impossible say little of the weights, at enormous |log rho|
_POWER = (
    8.0  # the slope is asked for once the learner's squared change is this many times the noise: it then errs by 1/9
)
_ARRIVED = 0.75  # a slope that is surely below this is no noise
_FLOOR = 5e-4  # mean |pi - mu| that matters to nobody, a fifth of what bf16 shows: it is added wherever two are divided
_STALE = 5e-3  # mean |mu - mu| between decode and prefill of one engine; sound ones show below 1e-3
_ABSURD = 0.1  # mean |pi - mu| that no precision explains: bf16 shows 0.003, int8 0.01, aggressive 4-bit 0.05


class DeliveryError(RuntimeError):
    """The sampler does not hold the weights it should; training on would be off-policy without saying so."""


@dataclass(frozen=True)
class Canary:
    """One scoring of the canary batch: the same tokens every time, on both sides."""

    mu: Tensor
    """float32 [N], the sampler's prefill log-probs."""
    pi: Tensor
    """float32 [N], the learner's."""
    expected: Tensor
    """float32 [N], the learner's as the sampler's precision rounds it; `pi` where nothing is rounded."""
    offsets: Tensor
    """int64 [B+1]."""
    scale_B: Tensor
    """[B], what the size of |pi - mu| is measured by."""

    @property
    def prob_diff(self) -> Tensor:
        """Mean |pi - mu| of each sequence, [B]."""
        return segment_sum((self.pi.exp() - self.mu.exp()).abs(), self.offsets) / self.offsets.diff()

    @property
    def relative_diff(self) -> Tensor:
        """[B]. Comparable between versions of the weights, not between engines."""
        return (self.prob_diff + _FLOOR) / (self.scale_B + _FLOOR)


class Delivery:
    """Delivers the policy's weights to the sampler, counts versions, and proves each delivery on a canary batch."""

    def __init__(
        self,
        policy: Policy,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        *,
        context: int,
        stop_token_ids: tuple[int, ...] = (),
        tokens: int = 8,
        prove: bool = True,
        frozen_scales: bool = False,
    ):
        """prompts: what the canary is made from, one sequence each. tokens: how far each is decoded anew every time.

        frozen_scales: a quantised sampler keeps the scales of the first delivery.
        """
        self.policy = policy
        self.sampler = sampler
        self.prove = prove
        self._prompts = [list(map(int, prompt)) for prompt in prompts]
        room = max(1, context - 1 - max(map(len, prompts)))  # scoring a sequence may cost the engine one token more
        tokens = min(tokens, room)
        self._context, self._longest = context, context - 1 - tokens
        self._answering = Sampling(max_tokens=min(32, room), stop_token_ids=stop_token_ids, seed=0)
        self._continuing = Sampling(max_tokens=tokens, stop_token_ids=(), seed=0)
        self._answers: list[list[int]] = []  # given when the sampler first holds weights, and kept
        self._quantiser = sampler.quantiser
        self._meter = None
        if self._quantiser is not None:
            self._quantiser.start(frozen_scales)
            self._meter = StepMeter(self._quantiser)
        self._first: Canary | None = None
        self._moved: Canary | None = None  # the last canary at which the sampler's log-probs had changed

    def deliver(self, version: int) -> dict[str, float]:
        """Load the weights as `version`, prove that they arrived, return `delivery/...` metrics and `time/delivery`.

        Raises DeliveryError naming what did not land.
        """
        start = time.perf_counter()
        metrics = {}
        if self._meter is not None and (below := self._meter.measure(self.policy.weights())) is not None:
            metrics["delivery/below_step_fraction"] = below
        if self._quantiser is not None and self._quantiser.needs_calibration:
            self._calibrate()
        holds_weights = self.sampler.version >= 0
        prefixes = self._prefixes() if self.prove and self._answers and holds_weights else []
        if prefixes:
            self.sampler.generate(prefixes, self._continuing)  # now they are cached, under the old weights
        self.sampler.load(self.policy.weights(), version)
        metrics["time/load"] = time.perf_counter() - start
        if self.prove:
            metrics |= self._prove_weights(version)
            if prefixes:
                metrics["delivery/cache_prob_diff"] = self._prove_cache(prefixes, version)
        metrics["time/delivery"] = time.perf_counter() - start
        return metrics

    def state(self) -> dict[str, Tensor]:
        """The canary and its null of step 0, so that a resumed run is held to the same standard; and frozen scales."""
        scales = {} if self._quantiser is None else self._quantiser.state()
        scales = {f"scales/{name}": scale for name, scale in scales.items()}
        if self._first is None:
            return scales
        first = {f"first/{field.name}": getattr(self._first, field.name) for field in fields(Canary)}
        lengths = torch.tensor([len(ids) for ids in self._answers])
        return scales | first | {"answers/ids": pack(self._answers, torch.int64), "answers/lengths": lengths}

    def load_state(self, state: dict[str, Tensor]) -> None:
        if self._quantiser is not None:
            prefix = "scales/"
            self._quantiser.load_state({n.removeprefix(prefix): state[n] for n in state if n.startswith(prefix)})
        if "answers/ids" not in state:
            return
        kept = {field.name: state.get(f"first/{field.name}", state["first/pi"]) for field in fields(Canary)}
        self._first = Canary(**kept)  # runs from before `expected` was kept go on without it
        self._answers = [ids.tolist() for ids in state["answers/ids"].split(state["answers/lengths"].tolist())]

    def _calibrate(self) -> None:
        """Ranges of activations, from the learner's own answers: at the first delivery the sampler has none to give."""
        if not self._answers:
            answers = own_answers(self.policy, self._prompts, self._answering, self._context)
            self._answers = [answers.response(row).tolist() for row in range(len(answers))]
        with self._quantiser.calibrate(self.policy.model):
            self.policy.score(Rollouts.from_lists(self._prompts, self._answers))

    # --- weights --------------------------------------------------------------------------------------------------

    def _prove_weights(self, version: int) -> dict[str, float]:
        if self.sampler.version != version:
            raise DeliveryError(f"the sampler says it holds version {self.sampler.version}, {version} was delivered")
        if not self._answers:
            # The model's own answers: text on which its probabilities are what they are in training.
            answers = self.sampler.generate(self._prompts, self._answering)
            self._answers = [answers.response(row).tolist() for row in range(len(answers))]
        canary, decoded_kl = self._score()
        if not (canary.mu.isfinite().all() and canary.pi.isfinite().all()):
            raise DeliveryError(f"after delivering version {version} log-probs of the canary batch are not finite")
        difference = float(canary.prob_diff.mean())
        metrics = {"delivery/canary_kl": decoded_kl, "delivery/canary_prob_diff": difference}
        if self._first is None:
            rounding = float((canary.pi.exp() - canary.expected.exp()).abs().mean())
            if difference > _ABSURD + 2 * rounding:
                raise DeliveryError(
                    f"sampler and learner disagree before training: mean |pi - mu| {difference:.3f} on the canary batch, "
                    f"where {self.sampler.engine} should show about {max(rounding, 0.01):.2f} or less. The first delivery did not land, or the "
                    "engine does not implement this architecture as transformers does"
                )
            self._first = self._moved = canary
            return metrics
        arrived = self._check_movement(canary, version)
        if arrived is not None:
            metrics["delivery/arrived"] = arrived
        if (ratio := worsened(self._first, canary)) is not None:
            raise DeliveryError(
                f"part of version {version} did not land: sampler and learner disagree on the canary batch {ratio:.1f} times "
                f"as much as at step 0. Mean |pi - mu| {difference:.4f}, then {self._first.prob_diff.mean():.4f} "
                f"(engine {self.sampler.engine})"
            )
        return metrics

    def _score(self) -> tuple[Canary, float]:
        """The canary, and the KL(sampler, learner) of tokens that the sampler decodes now from the same prompts."""
        decoded = self.sampler.generate(self._prompts, self._continuing)
        fixed = Rollouts.from_lists(self._prompts, self._answers)
        mu = self.sampler.score(fixed)
        pi = self.policy.score(Rollouts.concat([fixed, decoded]))[0]
        log_rho, pi = pi[fixed.tokens :] - decoded.sampler_logprobs, pi[: fixed.tokens]
        p, expected = pi.exp(), pi.clone()  # a copy, because checkpoints take no two names for one memory
        if self._quantiser is not None:
            with self._quantiser.simulated(self.policy.model):
                expected = self.policy.score(fixed)[0]
            spread = (p - expected.exp()).abs()
        else:
            spread = p * (1 - p)
        scale_B = segment_sum(spread, fixed.offsets) / fixed.lengths
        return Canary(mu, pi, expected, fixed.offsets, scale_B), float((log_rho.exp() - 1 - log_rho).mean())

    def _check_movement(self, canary: Canary, version: int) -> float | None:
        """The share of the learner's change since step 0 that the sampler shows, once that can be told."""
        first, floor = self._first, torch.tensor(_LEAST_PROBABILITY).log()
        noise = (first.pi - first.mu).abs().mean()
        if self._moved is None or not torch.equal(canary.mu, self._moved.mu):
            self._moved = canary
        elif (since := (canary.pi - self._moved.pi).abs().mean()) > 0.1 * noise:
            raise DeliveryError(
                f"version {version} did not land: the sampler's log-probs of the canary batch are the same to the last "
                f"bit as before, while the learner's moved by {since:.2g} on average. It still holds older weights"
            )
        seen = (first.pi > floor) & (canary.pi > floor)
        pi_change, mu_change = (canary.pi - first.pi)[seen], (canary.mu - first.mu)[seen]
        power, null = float(pi_change.square().sum()), float((first.pi - first.mu)[seen].square().sum())
        if power <= _POWER * null:
            return None
        slope, error = _slope(mu_change, pi_change)
        expected, expected_error = _slope((canary.expected - first.expected)[seen], pi_change)
        if slope + 4 * error < min(_ARRIVED, expected - 4 * expected_error):
            raise DeliveryError(
                f"version {version} did not land: since step 0 the sampler moved by {slope:.0%} (+-{error:.0%}) of what the "
                "learner moved on the canary batch. Weights are stale, or many of them are never delivered"
            )
        return slope

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def _prefixes(self) -> list[list[int]]:
        """A few sequences longer than one block of the prefix cache; none where the context has no room for that."""
        least = self.sampler.prefix_block + 1
        if least == 1 or least > self._longest:
            return []
        whole = [prompt + answer for prompt, answer in zip(self._prompts, self._answers)]
        return [_stretch(whole, row, least) for row in range(min(4, len(whole)))]

    def _prove_cache(self, prefixes: list[list[int]], version: int) -> float:
        decoded = self.sampler.generate(prefixes, self._continuing)
        difference = float((decoded.sampler_logprobs.exp() - self.sampler.score(decoded).exp()).abs().mean())
        if difference > _STALE:
            raise DeliveryError(
                f"after delivering version {version}, continuations decoded through the prefix cache disagree with a fresh "
                f"prefill of the same tokens: mean probability difference {difference:.4f}, expected below {_STALE}. Prefixes "
                "computed under older weights are still in use; the sampler must reset its cache when weights are loaded"
            )
        return difference


def worsened(first: Canary, now: Canary) -> float | None:
    """How many times as much the two sides disagree as at step 0, relative to what the precision does; None while that may
    be chance, or is too small to matter to anybody: a policy grown certain leaves the scale at 0, but rounding stays."""
    if now.prob_diff.mean() <= _FLOOR:
        return None
    log_ratio_B = (now.relative_diff / first.relative_diff).log()
    ratio, error = float(log_ratio_B.mean().exp()), float(log_ratio_B.std()) / len(log_ratio_B) ** 0.5
    return ratio if ratio > 2 and log_ratio_B.mean() > 4 * error else None


def own_answers(policy: Policy, prompts: Sequence[Sequence[int]], sampling: Sampling, context: int) -> Rollouts:
    """What the learner itself answers, by the reference engine; what static activation scales are calibrated on."""
    training = policy.model.training
    policy.model.eval()  # with gradient checkpointing, transformers keeps no cache in training mode
    try:
        return TransformersSampler(policy.model, "bf16", context=context).generate(prompts, sampling)
    finally:
        policy.model.train(training)


def load_once(
    policy: Policy, sampler: Sampler, prompts: Sequence[Sequence[int]], sampling: Sampling, context: int
) -> None:
    """The policy's weights into a sampler that is to be measured, not trained with: version 0. Static activation scales are
    calibrated on the learner's own answers to the first of `prompts`."""
    if sampler.quantiser is not None and sampler.quantiser.needs_calibration:
        answers = own_answers(policy, prompts[:32], replace(sampling, n=1), context)
        with sampler.quantiser.calibrate(policy.model):
            policy.score(answers)
    sampler.load(policy.weights(), 0)


def _slope(change: Tensor, cause: Tensor) -> tuple[float, float]:
    """Of `change` on `cause` through the origin, with its standard error."""
    power = float(cause.square().sum())
    slope = float((change * cause).sum()) / power
    return slope, float(((change - slope * cause) * cause).square().sum().sqrt()) / power


def _stretch(prompts: Sequence[Sequence[int]], start: int, length: int) -> list[int]:
    """Prompts one after another, from `start` on and round again, until there are `length` tokens."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.extend(map(int, prompts[start % len(prompts)]))
        start += 1
    return tokens[:length]
