"""rho -> weights, masks and counts, by a `Correction`. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.correction.presets import preset
from trueup.correction.spec import Correction, Filter
from trueup.packing import pack_columns, wide
from trueup.rollouts import segment_ids, segment_max, segment_sum

# No weight exceeds e^20 = 4.9e8, the bound verl and slime use too: a larger one only turns the gradient norm into inf.
_LOG_LIMIT = 20.0


@dataclass(frozen=True)
class Corrected:
    """What `correct` found for N tokens, in the caller's kind and shape: [N], or [B, T] with 0 and False at padding."""

    weights_N: Tensor | np.ndarray
    """float32 [N], no gradient; 0 where `keep_N` is false."""
    keep_N: Tensor | np.ndarray
    """bool [N], tokens that enter the loss: chosen by the policy, both log-probs known, neither masked nor filtered."""
    valid_N: Tensor | np.ndarray
    """bool [N], chosen by the policy and both log-probs known: what could have been kept. Pass it as the loss mask of
    `objectives.token_weights`, so that missing tokens leave the denominator even where rejected ones stay."""
    denominator_N: Tensor | np.ndarray
    """bool [N], tokens that the mean of the loss is over: `keep_N` or, with `dropped_in_denominator`, `valid_N`."""
    counts: dict[str, float]
    """Sums over tokens and responses: add the counts of several parts (`add_counts`) before making fractions."""

    @property
    def stats(self) -> dict[str, float]:
        return fractions(self.counts)


def correct(
    correction: Correction | str | Mapping,
    sampler_logprobs_N: Tensor | np.ndarray,
    learner_logprobs_N: Tensor | np.ndarray | None,
    offsets: Tensor | np.ndarray | None,
    loss_mask_N: Tensor | np.ndarray | None = None,
    advantages_N: Tensor | np.ndarray | None = None,
) -> Corrected:
    """Weights and keep mask of each token.

    Args:
        correction: a `Correction`, or what `preset` makes one of.
        sampler_logprobs_N: [N] log mu as sampled from; NaN or infinite: missing, dropped and counted.
        learner_logprobs_N: [N] log pi_old at the same temperature; None is allowed where no ratio is needed (weights 1,
            no filters), so that PPO-IS need not compute it.
        offsets: int64 [B+1]. None: all inputs are padded [B, T] and `loss_mask_N` is required.
        loss_mask_N: bool [N]; None: all tokens were chosen by the policy.
        advantages_N: [N], needed by filters that act on one sign of the advantage; in a padded batch also [B] or [B, 1].

    Tensors (any device, any float type; results lie where the learner's log-probs do), or NumPy arrays and lists.
    A missing or masked-out token is left out of its response's product, mean and maximum (log rho 0 in the product).
    Ratios are formed in log space in float64 (float32 on devices without it), compared with the bounds there, and only
    then exponentiated; e^20 is the largest weight, also without a bound. Raises ValueError where inputs do not fit.
    """
    correction = preset(correction)
    if learner_logprobs_N is None and (correction.level != "none" or correction.filters):
        raise ValueError(f"this correction ({correction}) needs learner_logprobs_N, the recomputed log pi_old")
    for item in correction.filters:
        if item.advantage != "any" and advantages_N is None:
            raise ValueError(f"the filter '{item}' needs advantages_N")
    with torch.no_grad():
        given = {
            "sampler_logprobs_N": sampler_logprobs_N,
            "learner_logprobs_N": learner_logprobs_N,
            "advantages_N": advantages_N,
        }
        packed = pack_columns(given, offsets, loss_mask_N, "learner_logprobs_N", per_response=("advantages_N",))
        sampler_N, learner_N, advantages_N = packed.columns.values()
        sampler_N = wide(sampler_N)
        learner_N = sampler_N if learner_N is None else wide(learner_N)
        loss_mask_N, offsets = packed.mask_N, packed.offsets
        valid_N = loss_mask_N & torch.isfinite(sampler_N) & torch.isfinite(learner_N)
        log_rho_N = torch.where(valid_N, learner_N - sampler_N, 0)
        low, high = _log(correction.low), _log(correction.high)
        level_N = torch.zeros_like(log_rho_N)
        if correction.level != "none":
            level_N = _at_level(log_rho_N, valid_N, offsets, correction.level)
        outside_N = valid_N & ((level_N < low) | (level_N > high))
        keep_N = valid_N & ~outside_N if correction.bound == "mask" else valid_N
        level_N = level_N.clamp(low, high) if correction.bound == "truncate" else level_N
        for item in correction.filters:
            keep_N = keep_N & _passes(item, log_rho_N, learner_N, sampler_N, valid_N, offsets, advantages_N)
        weights_N = torch.where(keep_N, level_N.clamp(max=_LOG_LIMIT).exp(), 0).float()
        kept_B, valid_B = segment_sum(keep_N.long(), offsets), segment_sum(valid_N.long(), offsets)
        found = {
            "tokens": loss_mask_N.sum(),  # chosen by the policy
            "valid": valid_N.sum(),  # of these, not missing
            "kept": keep_N.sum(),
            "truncated": (outside_N & keep_N).sum(),
            "weight_sum": wide(weights_N).sum(),
            "responses": (valid_B > 0).sum(),  # with a valid token
            "responses_dropped": ((valid_B > 0) & (kept_B == 0)).sum(),  # of these, with none kept
        }
        values = torch.stack([wide(value) for value in found.values()]).tolist()  # one transfer from the device
        denominator_N = valid_N if correction.dropped_in_denominator else keep_N
        results = (packed.restore(values_N) for values_N in (weights_N, keep_N, valid_N, denominator_N))
        return Corrected(*results, dict(zip(found, values, strict=True)))


def fractions(counts: Mapping[str, float]) -> dict[str, float]:
    """Counts -> `correction/...` over the valid tokens: share truncated (and kept), share masked or filtered, and the
    mean weight with rejected tokens as 0, i.e. how much of the loss survives. All are 0 without valid tokens."""
    valid = max(counts["valid"], 1)
    return {
        "correction/truncated_fraction": counts["truncated"] / valid,
        "correction/masked_fraction": (counts["valid"] - counts["kept"]) / valid,
        "correction/weight_mean": counts["weight_sum"] / valid,
    }


def add_counts(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counts of several micro-batches -> counts of their union."""
    parts = list(parts)
    return {name: sum(part[name] for part in parts) for name in parts[0]} if parts else {}


def _at_level(log_rho_N: Tensor, valid_N: Tensor, offsets: Tensor, level: str) -> Tensor:
    """log of the ratio at `level`, [N]; `log_rho_N` is 0 on tokens that do not count."""
    if level == "token":
        return log_rho_N
    log_rho_B = segment_sum(log_rho_N, offsets)
    if level == "geometric":
        log_rho_B = log_rho_B / segment_sum(valid_N.to(log_rho_N.dtype), offsets).clamp(min=1)
    return log_rho_B[segment_ids(offsets)]


def _passes(item: Filter, log_rho_N, learner_N, sampler_N, valid_N, offsets, advantages_N) -> Tensor:
    """bool [N], tokens that `item` lets through."""
    low, high = item.low, item.high
    if item.criterion == "ratio":
        value_N, low, high = log_rho_N, _log(low), _log(high)
    elif item.criterion == "k1":
        value_N = -log_rho_N
    elif item.criterion == "k2":
        value_N = log_rho_N.square() / 2
    elif item.criterion == "k3":
        value_N = torch.expm1(log_rho_N.clamp(max=_LOG_LIMIT)) - log_rho_N
    else:
        # Clamped because a placeholder such as 1.0 is a "log-prob" above 0, and no probability.
        value_N = torch.where(valid_N, learner_N.clamp(max=0).exp() - sampler_N.clamp(max=0).exp(), 0)
    if item.aggregate == "max":
        value_N = segment_max(torch.where(valid_N, value_N, -math.inf), offsets)[segment_ids(offsets)]
    elif item.aggregate != "token":
        value_N = _at_level(value_N, valid_N, offsets, "sequence" if item.aggregate == "sum" else "geometric")
    inside_N = (value_N >= low) & (value_N <= high)
    if item.advantage == "any":
        return inside_N
    return inside_N | ~(advantages_N < 0 if item.advantage == "negative" else advantages_N > 0)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
