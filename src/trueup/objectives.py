"""Log-probs + advantages + weights -> loss. Pure functions.

Shapes in names: N response tokens end to end, B responses. r = pi_theta / pi_old is the policy ratio (staleness and
minibatch drift); the mismatch ratio rho = pi_old / mu is not in here: it arrives as weights without gradient, from
`correction.correct`. Losses are to be *minimised*. A minibatch's loss is

    sum(weight_N * loss_N) / denominator        with weight_N and denominator from `token_weights`,

and both are sums over responses: a trainer adds up numerators and denominators over micro-batches, however the rows
are split, and divides once at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.rollouts import segment_ids, segment_sum

# Log policy ratios are bounded by this before exp, as in verl: e^20 is beyond any clip, e^89 would be inf.
_LOG_LIMIT = 20.0


@dataclass(frozen=True)
class Objective:
    """Which loss, and how token losses become one number."""

    __pydantic_config__ = {"extra": "forbid"}  # where a configuration is made of it, a misspelt field is an error

    kind: str = "ppo"
    """`ppo` (also GRPO and DAPO, which differ in advantages and aggregation), `gspo`, `cispo`, `reinforce`."""
    clip_low: float = 0.2
    """The policy ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """... and above at 1 + clip_high; larger than clip_low is DAPO's clip-higher (0.28)."""
    dual_clip: float | None = None
    """ppo only: the loss of a negative advantage is at most dual_clip * |A| (Ye et al. 2019, arXiv 1912.09729)."""
    aggregation: str = "token-mean"
    """`token-mean` (DAPO), `sequence-mean` (GRPO: mean over a response's tokens, then over responses), `constant` (Dr.
    GRPO: sum over tokens, divided by responses * longest length allowed, so that length does not scale the gradient)."""
    kl_coefficient: float = 0.0
    """Of `kl_penalty` towards a reference, added to the token losses."""
    kl_estimator: str = "k3"
    """`k1`, `k2`, `k3` of `kl_penalty`; k3 is what GRPO uses."""
    entropy_coefficient: float = 0.0
    """Of the entropy, subtracted from the token losses."""
    value_clip: float | None = 0.2
    """Of `value_loss`; None: no clip."""

    def __post_init__(self):
        valid = {
            "kind": ("ppo", "gspo", "cispo", "reinforce"),
            "aggregation": ("token-mean", "sequence-mean", "constant"),
            "kl_estimator": ("k1", "k2", "k3"),
        }
        for name, choices in valid.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"objective {name}={getattr(self, name)!r} is unknown; valid: {', '.join(choices)}")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"clip_low={self.clip_low} and clip_high={self.clip_high} are distances from a ratio of 1: "
                "clip_low lies in [0, 1], clip_high at 0 or above"
            )
        if self.dual_clip is not None and self.kind != "ppo":
            raise ValueError(f"dual_clip belongs to kind=ppo; {self.kind} has none")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip={self.dual_clip} must exceed 1 + clip_high = {1 + self.clip_high}")


def policy_loss(
    objective: Objective,
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    offsets: Tensor,
    keep_N: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token, float32 [N], neither aggregated nor normalised; 0 where `keep_N` is false.

    With A the advantage, w the mismatch weight, and clip(r) = clamp(r, 1 - clip_low, 1 + clip_high):

        ppo        w * max(-A r, -A clip(r)), for A < 0 at most w * dual_clip * |A|   (Schulman et al. 2017, 1707.06347)
        gspo       the same on s_t = sg[s] pi_theta / sg[pi_theta], s = exp(mean over the response of log r): the
                   whole response's ratio in value, each token's gradient             (Zheng et al. 2025, 2507.18071)
        cispo      -w A sg[clip(r)] log pi_theta: every token keeps a gradient        (MiniMax 2025, 2506.13585)
        reinforce  -w A log pi_theta

    The weight multiplies outside the clip and after the dual clip: it corrects whom the sample came from, and must not
    be clipped away with the step size. Gradient flows through `logprobs_N` only; sg is stop-gradient.

    Args:
        logprobs_N, old_logprobs_N: [N] log pi_theta and log pi_old at the sampling temperature; with PPO-IS
            (`Correction.anchor == "sampler"`) the latter is the sampler's log mu.
        advantages_N, weights_N, keep_N: [N]. What stands at dropped tokens does not matter, NaN included.

    Deviations: GSPO's mean runs over kept tokens, the paper's over all. CISPO's paper drops the lower bound: clip_low=1
    does that. `log r` is bounded by +-20 before exp, which removes the gradient beyond.

    Returns the losses, and sums for `policy_stats` (0-d tensors without gradient; add them up over micro-batches).
    """
    keep_N = keep_N.bool()
    logprobs_N = torch.where(keep_N, logprobs_N.float(), 0)
    log_ratio_N = logprobs_N - torch.where(keep_N, old_logprobs_N.detach().float(), 0)
    advantages_N = torch.where(keep_N, advantages_N.detach().float(), 0)
    weights_N = torch.where(keep_N, weights_N.detach().float(), 0)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    with torch.no_grad():
        safe_N = log_ratio_N.clamp(-_LOG_LIMIT, _LOG_LIMIT)
        kl_old_N = torch.expm1(safe_N) - safe_N
    if objective.kind == "reinforce":
        loss_N, cut_N = -advantages_N * logprobs_N, torch.zeros_like(keep_N)
    elif objective.kind == "cispo":
        ratio_N = safe_N.exp()
        loss_N = -advantages_N * ratio_N.clamp(low, high) * logprobs_N
        cut_N = (ratio_N < low) | (ratio_N > high)
    else:
        if objective.kind == "gspo":
            length_B = segment_sum(keep_N.float(), offsets).clamp(min=1)
            mean_B = segment_sum(log_ratio_N.detach(), offsets) / length_B
            log_ratio_N = mean_B[segment_ids(offsets)] + logprobs_N - logprobs_N.detach()
        ratio_N = log_ratio_N.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()
        free_N, clipped_N = -advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high)
        loss_N, cut_N = torch.maximum(free_N, clipped_N), clipped_N > free_N
        if objective.dual_clip is not None:
            most_N = objective.dual_clip * advantages_N.abs()
            over_N = loss_N > most_N  # of negative advantages only: the others' losses are never above 0
            loss_N, cut_N = torch.where(over_N, most_N, loss_N), cut_N | over_N
    sums = {
        "tokens": keep_N.sum(),
        "clipped": (cut_N & keep_N).sum(),
        "kl_old": torch.where(keep_N, kl_old_N, 0).sum(),
    }
    return torch.where(keep_N, weights_N * loss_N, 0), sums


def policy_stats(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Sums of `policy_loss`, added up over micro-batches -> metrics.

    `policy/clip_fraction`: kept tokens whose gradient the clip took away (cispo: whose ratio it bounded).
    `policy/kl_old`: k3 estimate of KL(pi_old||pi_theta), mean of r - 1 - log r, nats.
    """
    tokens = max(float(sums["tokens"]), 1.0)
    return {"policy/clip_fraction": float(sums["clipped"]) / tokens, "policy/kl_old": float(sums["kl_old"]) / tokens}


def token_weights(
    aggregation: str,
    keep_N: Tensor,
    loss_mask_N: Tensor,
    offsets: Tensor,
    dropped_in_denominator: bool = False,
    constant_length: int | None = None,
) -> tuple[Tensor, float]:
    """Weight of each token's loss, float32 [N], and the denominator that belongs to these responses.

        token-mean      1                              number of tokens
        sequence-mean   1 / tokens of the response     number of responses with any token
        constant        1                              number of responses with any token * constant_length

    Tokens counted are the kept ones or, with `dropped_in_denominator`, all under `loss_mask_N` (pass
    `Corrected.valid_N` there: a missing log-prob is no rejection and always leaves). Weights are 0 where `keep_N` is
    false in either case. The denominator is 0 where nothing counts: skip the update.

    Deviation: Dr. GRPO divides by every response; one that was rejected whole leaves here, like any rejected token.
    """
    keep_N = keep_N.bool()
    counted_N = loss_mask_N.bool() if dropped_in_denominator else keep_N
    length_B = segment_sum(counted_N.float(), offsets)
    responses = float((length_B > 0).sum())
    weight_N = keep_N.float()
    if aggregation == "token-mean":
        return weight_N, float(counted_N.sum())
    if aggregation == "sequence-mean":
        return weight_N / length_B.clamp(min=1)[segment_ids(offsets)], responses
    if aggregation == "constant":
        if not constant_length:
            raise ValueError("aggregation=constant needs constant_length, the longest response allowed, in tokens")
        return weight_N, responses * constant_length
    raise ValueError(f"aggregation={aggregation!r} is unknown; valid: token-mean, sequence-mean, constant")


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None = 0.2) -> Tensor:
    """PPO's clipped value loss of each token, float32 [N]: 0.5 max((V - R)^2, (V_clip - R)^2), where V_clip is V kept
    within `clip` of the value at rollout time (baselines' ppo2; not in the paper). clip=None: 0.5 (V - R)^2."""
    values_N, old_values_N, returns_N = values_N.float(), old_values_N.detach().float(), returns_N.detach().float()
    error_N = (values_N - returns_N).square()
    if clip is not None:
        clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (clipped_N - returns_N).square())
    return 0.5 * error_N


def explained_variance(values_N: Tensor, returns_N: Tensor, mask_N: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the mask: 1 is perfect, 0 no better than a constant, below 0 worse.
    0 where the returns do not vary: there is nothing to explain."""
    values, returns = values_N.detach()[mask_N.bool()].double(), returns_N.detach()[mask_N.bool()].double()
    if len(returns) == 0:
        return 0.0
    variance = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else 0.0


def kl_penalty(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate of KL(pi_theta||pi_ref) at each token, float32 [N], gradient through `logprobs_N`; nats.

    With x = log pi_ref - log pi_theta: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x (Schulman, "Approximating KL
    divergence", 2020). As a *loss*, only k2 has the gradient of that KL when tokens come from pi_theta; k1's is 0 on
    average, k3's is that of KL(pi_ref||pi_theta). x is bounded by +-20 in k3's exponential.
    """
    x_N = reference_logprobs_N.detach().float() - logprobs_N.float()
    if estimator == "k1":
        return -x_N
    if estimator == "k2":
        return x_N.square() / 2
    if estimator == "k3":
        return torch.expm1(x_N.clamp(-_LOG_LIMIT, _LOG_LIMIT)) - x_N
    raise ValueError(f"kl estimator {estimator!r} is unknown; valid: k1, k2, k3")
