"""rho -> statistics: how far the policy that sampled is from the policy that learns. Pure functions.

Shapes in names: N response tokens end to end, B responses. mu is the sampler, pi the learner at the weights that were
delivered, and rho = pi / mu the mismatch ratio of a sampled token; log rho is in nats. Every statistic is of *raw*
ratios over response tokens under the loss mask, before any correction, so runs with and without one can be compared.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trueup.packing import pack_columns, wide
from trueup.rollouts import offsets_of, segment_sum

# Ratios are exponentiated up to e^LIMIT: far beyond any real one, and the square of a sum of them is still finite.
_LIMIT = {torch.float64: 300.0, torch.float32: 40.0}

# 1 is what perfect agreement shows; reported where nothing can be measured: no NaN enters a curve or a JSON file.
_ONE_WHEN_EMPTY = ("rho_mean", "rho_mean_low", "rho_mean_high", "rho_max", "ess_token", "ess_sequence")


def measure(
    sampler_logprobs_N: Tensor | np.ndarray,
    learner_logprobs_N: Tensor | np.ndarray,
    offsets: Tensor | np.ndarray | None,
    loss_mask_N: Tensor | np.ndarray | None = None,
    entropy_N: Tensor | np.ndarray | None = None,
) -> dict[str, float]:
    """Statistics of the mismatch between sampler and learner, as flat names `mismatch/...`.

    Args:
        sampler_logprobs_N: [N] log mu of each sampled token, as sampled from; NaN (or infinite): missing.
        learner_logprobs_N: [N] log pi of the same tokens at the same temperature; NaN (or infinite): missing.
        offsets: int64 [B+1], where each response starts in the packed vectors. None: all inputs are padded [B, T] and
            `loss_mask_N` is required to tell tokens from padding.
        loss_mask_N: bool [N], false for tokens the policy did not choose. None: all are chosen.
        entropy_N: [N] entropy of the learner's distribution at each token, nats; adds `mismatch/kl_per_entropy`.

    Tensors (any device, any float type), or NumPy arrays and lists; arithmetic is float64 (float32 on devices without it).
    Missing tokens are left out of every statistic and counted in `missing_fraction`.

    Returns, over the n measured tokens (x = log rho):
        kl_k1: mean(-x), unbiased for KL(mu||pi), noisy, may be negative. kl_k3: mean(rho - 1 - x), same target, never
            negative (Schulman, "Approximating KL divergence", 2020).
        prob_diff_mean, _q99, _max: of |pi - mu|, the probability that moved at the sampled token.
        log_rho_abs_mean, _q50, _q90, _q99, _max: of |x|. Quantiles are nearest-rank: a value that was observed.
        rho_mean: estimates E_mu[rho], which is 1 for any two distributions of equal support; with rho_mean_low, _high,
            its 95% interval. Away from 1, something is broken, whatever the noise.
        rho_max: largest rho.
        ess_token: (sum rho)^2 / (n sum rho^2), in (0, 1]. ess_sequence: the same over responses, on products of rho.
        missing_fraction: of the tokens under the loss mask, how many lack either log-prob.
        kl_per_entropy: kl_k3 / mean entropy; 0 where the entropy is 0.
        tokens: n. With nothing to measure it is 0 and the rest are what perfect agreement shows (1 for ratios and ESS,
            else 0): look at `tokens` before trusting an empty batch.
    """
    given = {
        "sampler_logprobs_N": sampler_logprobs_N,
        "learner_logprobs_N": learner_logprobs_N,
        "entropy_N": entropy_N,
    }
    packed = pack_columns(given, offsets, loss_mask_N)
    sampler_N, learner_N, entropy_N = (None if value is None else wide(value) for value in packed.columns.values())
    mask_N, offsets = packed.mask_N, packed.offsets
    known_N = mask_N & torch.isfinite(sampler_N) & torch.isfinite(learner_N)
    length_B = segment_sum(known_N.long(), offsets)
    masked_in, tokens = int(mask_N.sum()), int(known_N.sum())
    missing = (masked_in - tokens) / masked_in if masked_in else 0.0
    # From here on only measured tokens exist: no mask can be forgotten below.
    if tokens == 0:
        return _empty(missing, entropy_N is not None)
    if tokens < len(known_N):
        sampler_N, learner_N = sampler_N[known_N], learner_N[known_N]
        entropy_N = None if entropy_N is None else entropy_N[known_N]
    offsets = offsets_of(length_B).to(offsets.device)

    limit = _LIMIT[sampler_N.dtype]
    log_rho_N = learner_N - sampler_N
    rho_N = log_rho_N.clamp(max=limit).exp()
    k3_N = torch.expm1(log_rho_N.clamp(max=limit)) - log_rho_N  # expm1: rho - 1 loses all digits near agreement
    abs_N = log_rho_N.abs()
    # Clamped because a placeholder such as 1.0 is a "log-prob" above 0, and no probability.
    prob_diff_N = (learner_N.clamp(max=0).exp() - sampler_N.clamp(max=0).exp()).abs()
    log_rho_B = segment_sum(log_rho_N, offsets)[length_B > 0]
    rho_mean, low, high = _mean_interval(rho_N, offsets, length_B)
    abs_q50, abs_q90, abs_q99 = _quantiles(abs_N, 0.5, 0.9, 0.99)
    found = {
        "kl_k1": (sampler_N - learner_N).mean(),
        "kl_k3": k3_N.mean(),
        "prob_diff_mean": prob_diff_N.mean(),
        "prob_diff_q99": _quantiles(prob_diff_N, 0.99)[0],
        "prob_diff_max": prob_diff_N.max(),
        "log_rho_abs_mean": abs_N.mean(),
        "log_rho_abs_q50": abs_q50,
        "log_rho_abs_q90": abs_q90,
        "log_rho_abs_q99": abs_q99,
        "log_rho_abs_max": abs_N.max(),
        "rho_mean": rho_mean,
        "rho_mean_low": low,
        "rho_mean_high": high,
        "rho_max": rho_N.max(),
        "ess_token": _ess_fraction(log_rho_N),
        "ess_sequence": _ess_fraction(log_rho_B),
    }
    if entropy_N is not None:
        entropy = entropy_N.mean()
        found["kl_per_entropy"] = torch.where(entropy > 0, k3_N.mean() / entropy, torch.zeros_like(entropy))
    values = torch.stack(list(found.values())).tolist()  # one transfer from the device, not one a statistic
    stats = {f"mismatch/{name}": value for name, value in zip(found, values, strict=True)}
    return stats | {"mismatch/missing_fraction": missing, "mismatch/tokens": float(tokens)}


def _mean_interval(rho_N: Tensor, offsets: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of rho over tokens with its 95% interval, clustered by response.

    Tokens of one response share their context, so the response is the unit of the sample. The mean is a ratio of sums,
    R = sum_i S_i / sum_i n_i; its variance, linearised, is B/(B-1) sum_i (S_i - R n_i)^2 / (sum_i n_i)^2 (Cochran,
    "Sampling Techniques", 6.4), times Student's t at B-1. Fewer than two responses carry no interval: the bounds are
    then the mean and 1, whichever way round, so that 1 is never excluded on no evidence.
    """
    mean, responses = rho_N.mean(), int((length_B > 0).sum())
    if responses < 2:
        return mean, mean.clamp(max=1), mean.clamp(min=1)
    residual_B = segment_sum(rho_N, offsets) - mean * length_B
    variance = responses / (responses - 1) * residual_B.square().sum() / len(rho_N) ** 2
    half = _student_t975(responses - 1) * variance.sqrt()
    return mean, mean - half, mean + half


def _student_t975(freedom: int) -> float:
    """97.5% point of Student's t: exact for 1 and 2 degrees, else Cornish-Fisher in 1/freedom (under 1% off)."""
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _ess_fraction(log_weight: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) of unclamped weights, never leaving the log domain: products of many rho overflow."""
    log_sum, log_square_sum = torch.logsumexp(log_weight, 0), torch.logsumexp(2 * log_weight, 0)
    return (2 * log_sum - log_square_sum - math.log(len(log_weight))).exp()


def _quantiles(values: Tensor, *rising: float) -> list[Tensor]:
    """Nearest-rank quantiles by selection: `torch.quantile` refuses more than 16 million values and sorts them all.
    Each is sought only among the values at or above the one before, counted from the top."""
    tail, found = values.float(), []  # float32: twice as fast
    for q in rising:
        above = len(values) - max(1, math.ceil(q * len(values)))
        chosen = tail.kthvalue(len(tail) - above).values
        tail = tail[tail >= chosen]
        found.append(chosen.to(values.dtype))
    return found


def _empty(missing: float, with_entropy: bool) -> dict[str, float]:
    names = ["kl_k1", "kl_k3", "prob_diff_mean", "prob_diff_q99", "prob_diff_max", "log_rho_abs_mean"]
    names += [f"log_rho_abs_{name}" for name in ("q50", "q90", "q99", "max")] + list(_ONE_WHEN_EMPTY)
    names += ["kl_per_entropy"] if with_entropy else []
    stats = {f"mismatch/{name}": float(name in _ONE_WHEN_EMPTY) for name in names}
    return stats | {"mismatch/missing_fraction": missing, "mismatch/tokens": 0.0}
