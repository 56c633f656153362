"""rho -> weights and masks, and the named presets. Pure functions.

Shapes in names: N response tokens end to end, B responses. mu is the sampler, pi_old the learner at the weights that
were delivered, and rho = pi_old / mu the mismatch ratio. The weights multiply each token's loss outside the policy
clip, after any dual clip, before aggregation (see `objectives.policy_loss`); they never carry gradient. Everything is
local to a response, so micro-batching cannot change it. `docs/corrections.md` says when to use which preset.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trueup.rollouts import segment_ids, segment_max, segment_sum

# No weight exceeds e^20 = 4.9e8, the bound verl and slime use too: a larger one only turns the gradient norm into inf.
_LOG_LIMIT = 20.0

_CHOICES = {
    "level": ("token", "sequence", "geometric", "none"),
    "bound": ("truncate", "mask", "none"),
    "anchor": ("learner", "sampler"),
    "criterion": ("ratio", "k1", "k2", "k3", "prob_diff"),
    "aggregate": ("token", "sum", "mean", "max"),
}


def _nearest(name, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name).lower().replace("_", "-"), list(choices), n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else ""


def _check_fields(owner, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value not in _CHOICES[name]:
            valid = ", ".join(_CHOICES[name])
            raise ValueError(f"{name}={value!r} is unknown{_nearest(value, _CHOICES[name])}; valid: {valid}")
    for name in ("low", "high"):
        try:
            object.__setattr__(owner, name, float(getattr(owner, name)))
        except (TypeError, ValueError):
            raise ValueError(f"{name}={getattr(owner, name)!r} is not a number") from None


def _known(given: Mapping, kind: type) -> dict:
    names = [field.name for field in fields(kind)]
    for name in given:
        if name not in names:
            raise ValueError(f"{kind.__name__.lower()} has no field {name!r}{_nearest(name, names)}; fields: {names}")
    return dict(given)


@dataclass(frozen=True)
class Filter:
    """Drops what lies outside [low, high] of a criterion, judged on raw ratios, whatever the weights are."""

    criterion: str = "ratio"
    """`ratio`: rho. `k1`: -log rho. `k2`: (log rho)^2 / 2. `k3`: rho - 1 - log rho. `prob_diff`: pi_old - mu, signed.
    The k are in nats, and estimate KL(mu||pi_old) when averaged."""
    aggregate: str = "token"
    """`token`: each token for itself. `sum`, `mean`, `max`: over the response, which is then dropped whole. A ratio is
    aggregated in log space: its sum is the product of rho, its mean the geometric mean."""
    low: float = -math.inf
    """Smallest value that passes, in the criterion's unit; -inf: no limit."""
    high: float = math.inf
    """Largest value that passes; inf: no limit."""
    negative_advantage_only: bool = False
    """Drop only tokens whose advantage is below 0: learning from a failure that the learner would hardly have produced
    is what destabilises (DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking)."""

    def __post_init__(self):
        _check_fields(self, "criterion", "aggregate")
        if not self.low <= self.high:
            raise ValueError(f"filter {self.criterion}: low={self.low} is above high={self.high}")

    def __str__(self) -> str:
        name = self.criterion if self.aggregate == "token" else f"{self.aggregate} {self.criterion}"
        what = "tokens" if self.aggregate == "token" else "responses"
        where = " where the advantage is negative" if self.negative_advantage_only else ""
        return f"drop {what} with {name} outside [{self.low:g}, {self.high:g}]{where}"


@dataclass(frozen=True)
class Correction:
    """How the mismatch ratio becomes a weight and a mask. The default is TIS with C = 2."""

    level: str = "token"
    """`token`: rho_t. `sequence`: product of rho over the response. `geometric`: exp(mean log rho). `none`: 1."""
    bound: str = "truncate"
    """`truncate`: clamp into [low, high]. `mask`: drop outside [low, high], raw ratio inside. `none`: raw ratio."""
    low: float = 0.0
    """Lower bound of the ratio itself, at most 1; 0: none."""
    high: float = 2.0
    """Upper bound, at least 1: TIS's C. 2 is the published value for 0.5B models; 8 was used at 32B."""
    filters: tuple[Filter, ...] = ()
    """Each drops tokens or responses besides."""
    anchor: str = "learner"
    """`sampler`: the trainer takes the sampler's log-probs as pi_old inside the clip (PPO-IS, "bypass"); weights 1."""
    dropped_in_denominator: bool = False
    """Rejected tokens stay in the loss's denominator: each rejection then shrinks the step, as in TRL and IcePop."""

    def __post_init__(self):
        _check_fields(self, "level", "bound", "anchor")
        if self.anchor == "sampler" and self.level != "none":
            raise ValueError(f"anchor=sampler already puts rho inside the clip; level={self.level} applies it twice")
        # One spelling each, so that equal corrections compare equal.
        if self.level == "none":
            object.__setattr__(self, "bound", "none")
        if self.bound == "none":
            object.__setattr__(self, "low", 0.0)
            object.__setattr__(self, "high", math.inf)
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                f"bounds [{self.low:g}, {self.high:g}] do not contain 1: even exactly on-policy tokens would change; "
                "they bound the ratio itself, not its distance from 1"
            )
        object.__setattr__(self, "filters", tuple(self.filters))

    def __str__(self) -> str:
        ratio = {
            "token": "rho per token",
            "sequence": "product of rho per response",
            "geometric": "geometric mean of rho per response",
        }
        interval = f"[{self.low:g}, {self.high:g}]"
        bound = {"truncate": f"truncated into {interval}", "mask": f"dropped outside {interval}", "none": "unbounded"}
        if self.level == "none":
            weight = "weights 1" if self.anchor == "learner" else "sampler log-probs as pi_old inside the clip"
        else:
            weight = f"{ratio[self.level]}, {bound[self.bound]}"
        dropped = ["dropped tokens stay in the denominator"] if self.dropped_in_denominator else []
        return "; ".join([weight, *map(str, self.filters), *dropped])


PRESETS: dict[str, Correction] = {
    # Nothing: the mismatch is measured and left alone.
    "none": Correction(level="none"),
    # Vanilla importance sampling, unbounded.
    "is": Correction(level="token", bound="none"),
    # The clip around pi_theta / mu does the correcting; verl's bypass mode with ppo_clip.
    "ppo-is": Correction(level="none", anchor="sampler"),
    # Yao et al. 2025, fengyao.notion.site/off-policy-rl: min(rho, C).
    "tis": Correction(level="token", bound="truncate", high=2.0),
    # Liu, Li et al. 2025, richardli.xyz/rl-collapse: rho where rho <= C, else dropped; one-sided. Here per token.
    "mis": Correction(level="token", bound="mask", high=2.0),
    # Ling team 2025, IcePop: two-sided, alpha = 0.5, beta = 5 (verl's decoupled_token_icepop has the same).
    "icepop": Correction(level="token", bound="mask", low=0.5, high=5.0),
    # Liu, Li et al. 2025, on the product over the response: truncated, and masked (one-sided, as published).
    "sequence-tis": Correction(level="sequence", bound="truncate", high=2.0),
    "sequence-mis": Correction(level="sequence", bound="mask", high=2.0),
    # Length-normalised, two-sided (verl: seq_mean_k1, slime: geometric); wider than theirs, see docs/corrections.md.
    "geometric-mask": Correction(level="geometric", bound="mask", low=0.98, high=1.02),
}


def preset(name: str | Mapping | Correction) -> Correction:
    """A preset's name, or a mapping of fields with an optional `preset` to start from -> Correction.

    `preset("tis")`, `preset({"preset": "tis", "high": 5})`, `preset({"level": "none", "filters": [{"criterion": "k3",
    "aggregate": "mean", "high": 0.01}]})`. Raises ValueError naming the nearest valid name.
    """
    if isinstance(name, Correction):
        return name
    if isinstance(name, str):
        if name not in PRESETS:
            raise ValueError(f"unknown correction {name!r}{_nearest(name, PRESETS)}; presets: {', '.join(PRESETS)}")
        return PRESETS[name]
    if not isinstance(name, Mapping):
        raise ValueError(f"a correction is a preset's name or a mapping of its fields, not {name!r}")
    given = dict(name)
    base = preset(given.pop("preset")) if "preset" in given else Correction()
    if "filters" in given:
        if not isinstance(given["filters"], (list, tuple)):
            raise ValueError(f"filters={given['filters']!r}: expected a list of mappings, one a filter")
        made = (item if isinstance(item, Filter) else Filter(**_known(item, Filter)) for item in given["filters"])
        given["filters"] = tuple(made)
    return replace(base, **_known(given, Correction))


@dataclass(frozen=True)
class Corrected:
    """What `correct` found for N tokens."""

    weights_N: Tensor
    """float32 [N], no gradient; 0 where `keep_N` is false."""
    keep_N: Tensor
    """bool [N], tokens that enter the loss: chosen by the policy, both log-probs known, neither masked nor filtered."""
    valid_N: Tensor
    """bool [N], chosen by the policy and both log-probs known: what could have been kept. Pass it as the loss mask of
    `objectives.token_weights`, so that missing tokens leave the denominator even where rejected ones stay."""
    counts: dict[str, float]
    """Sums over tokens and responses: add the counts of several parts (`add_counts`) before making fractions."""

    @property
    def stats(self) -> dict[str, float]:
        return fractions(self.counts)


def correct(
    correction: Correction,
    sampler_logprobs_N: Tensor,
    learner_logprobs_N: Tensor | None,
    offsets: Tensor,
    loss_mask_N: Tensor,
    advantages_N: Tensor | None = None,
) -> Corrected:
    """Weights and keep mask of each token.

    Args:
        sampler_logprobs_N: [N] log mu as sampled from; NaN or infinite: missing, dropped and counted.
        learner_logprobs_N: [N] log pi_old at the same temperature; None is allowed where no ratio is needed (weights 1,
            no filters), so that PPO-IS need not compute it.
        offsets: int64 [B+1].
        loss_mask_N: bool [N].
        advantages_N: [N], needed by filters on negative advantages only.

    A missing or masked-out token is left out of its response's product, mean and maximum (log rho 0 in the product).
    Ratios are formed in log space in float64 (float32 on devices without it), compared with the bounds there, and only
    then exponentiated; e^20 is the largest weight, also without a bound.
    """
    if learner_logprobs_N is None:
        if correction.level != "none" or correction.filters:
            raise ValueError(f"this correction ({correction}) needs learner_logprobs_N, the recomputed log pi_old")
        learner_logprobs_N = sampler_logprobs_N
    with torch.no_grad():
        sampler_N, learner_N, loss_mask_N = _wide(sampler_logprobs_N), _wide(learner_logprobs_N), loss_mask_N.bool()
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
            "weight_sum": _wide(weights_N).sum(),
            "responses": (valid_B > 0).sum(),  # with a valid token
            "responses_dropped": ((valid_B > 0) & (kept_B == 0)).sum(),  # of these, with none kept
        }
        values = torch.stack([_wide(value) for value in found.values()]).tolist()  # one transfer from the device
        return Corrected(weights_N, keep_N, valid_N, dict(zip(found, values, strict=True)))


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
        value_N = torch.where(valid_N, learner_N.exp() - sampler_N.exp(), 0)
    if item.aggregate == "max":
        value_N = segment_max(torch.where(valid_N, value_N, -math.inf), offsets)[segment_ids(offsets)]
    elif item.aggregate != "token":
        value_N = _at_level(value_N, valid_N, offsets, "sequence" if item.aggregate == "sum" else "geometric")
    inside_N = (value_N >= low) & (value_N <= high)
    if item.negative_advantage_only:
        if advantages_N is None:
            raise ValueError(f"the filter '{item}' needs advantages_N")
        inside_N = inside_N | (advantages_N >= 0)
    return inside_N


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)  # Apple GPUs have no float64


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
