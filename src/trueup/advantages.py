"""Rewards -> advantages. Pure functions.

Shapes in names: N response tokens end to end, B responses. Estimators that compare whole responses give one value a
response; `per_token` spreads it. Statistics are formed in float64, results are float32. A reward that is NaN or
infinite raises ValueError naming its row: one such value would silently turn a whole group or batch into NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.rollouts import segment_ids, segment_sum


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    offsets: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    loss_mask_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the token-level MDP (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after a response's last token, also where it was cut by length;
    A_t = delta_t + gamma lam A_{t+1}; returns are A_t + V_t, the critic's targets.

    Args:
        rewards_N: [N], e.g. of `place_terminal_reward`. values_N: [N], the critic's value before each token.
        loss_mask_N: bool [N]; tokens the policy did not choose (tool output) are stepped over: the critic is not
            trained on them, so no advantage may be bootstrapped through them. They get 0, and may carry no reward.

    Returns: advantages [N] and returns [N], float32, no gradient. Deviation from the paper: none; not whitened.
    """
    rewards_N, values_N = rewards_N.detach().float(), values_N.detach().float()
    if loss_mask_N is not None:
        loss_mask_N = loss_mask_N.bool()
        if (rewards_N[~loss_mask_N] != 0).any():
            raise ValueError("a token outside the loss mask carries a reward; put it on the last token inside the mask")
        chosen_B = segment_sum(loss_mask_N.long(), offsets)
        chosen_offsets = torch.cat([chosen_B.new_zeros(1), chosen_B.cumsum(0)])
        scattered = torch.zeros_like(values_N), torch.zeros_like(values_N)
        found = gae(rewards_N[loss_mask_N], values_N[loss_mask_N], chosen_offsets, gamma, lam)
        return tuple(whole.masked_scatter(loss_mask_N, part) for whole, part in zip(scattered, found, strict=True))
    lengths_B = offsets.diff()
    if len(values_N) == 0:
        return values_N, values_N
    next_values_N = torch.cat([values_N[1:], values_N.new_zeros(1)])
    next_values_N[offsets[1:][lengths_B > 0] - 1] = 0
    deltas_N = rewards_N + gamma * next_values_N - values_N
    # Padded on the right and time first, so that one step of the scan touches one contiguous row of all responses.
    row_N = segment_ids(offsets)
    position_N = torch.arange(len(values_N), device=values_N.device) - offsets[:-1][row_N]
    scan_TB = deltas_N.new_zeros(int(lengths_B.max()), len(lengths_B))
    scan_TB[position_N, row_N] = deltas_N
    for step in range(len(scan_TB) - 2, -1, -1):
        scan_TB[step] += gamma * lam * scan_TB[step + 1]
    advantages_N = scan_TB[position_N, row_N]
    return advantages_N, advantages_N + values_N


def place_terminal_reward(reward_B: Tensor, offsets: Tensor, loss_mask_N: Tensor | None = None) -> Tensor:
    """One reward a response -> rewards float32 [N], all on its last token (inside the loss mask, where one is given).

    A response without such a token has nowhere to put its reward and is left out."""
    _check_rewards(reward_B)
    rewards_N = reward_B.new_zeros(int(offsets[-1]), dtype=torch.float32)
    position_N = torch.arange(len(rewards_N), device=rewards_N.device)
    if loss_mask_N is not None:
        position_N = torch.where(loss_mask_N.bool(), position_N, -1)
    last_B = position_N.new_full((len(reward_B),), -1).scatter_reduce(0, segment_ids(offsets), position_N, "amax")
    rewards_N[last_B[last_B >= 0]] = reward_B.float()[last_B >= 0]
    return rewards_N


def group_relative(reward_B: Tensor, group_B: Tensor, normalise_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO: (r - mean of the group) / (std of the group + eps), float32 [B] (DeepSeekMath, arXiv 2402.03300, 4.1.2).

    `normalise_std=False` is Dr. GRPO's: r - mean (arXiv 2503.20783), without the extra weight that dividing by std
    gives to questions nearly always or nearly never solved. The std is unbiased (n - 1) and eps 1e-6 as in verl; TRL
    has eps 1e-4. A group of one gets 0 (verl: its raw reward): nothing was compared.
    """
    reward_B = _check_rewards(reward_B)
    index_B, count_G = _groups(group_B)
    centred_B = reward_B - _group_mean(reward_B, index_B, count_G)
    if not normalise_std:
        return centred_B.float()
    square_G = torch.zeros_like(count_G).index_add(0, index_B, centred_B.square())
    std_G = (square_G / (count_G - 1).clamp(min=1)).sqrt()
    return (centred_B / (std_G[index_B] + eps)).float()


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Leave-one-out: r_i - mean of the group's other rewards = n/(n-1) (r_i - mean), float32 [B] (Kool et al. 2019;
    Ahmadian et al. 2024, arXiv 2402.14740). A group of one gets 0: there is nothing to leave in."""
    reward_B = _check_rewards(reward_B)
    index_B, count_G = _groups(group_B)
    scale_G = count_G / (count_G - 1).clamp(min=1)
    return ((reward_B - _group_mean(reward_B, index_B, count_G)) * scale_G[index_B]).float()


def reinforce_plus_plus(
    reward_B: Tensor, group_B: Tensor | None = None, length_B: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++: (r - mean) / std over the whole batch, float32 [B] (arXiv 2501.03262).

    With `group_B` its baseline variant: the group's mean is subtracted first, then the whole batch is normalised.
    The paper and verl normalise over *tokens*; give `length_B` (tokens of each response that count) for that, leave it
    for equal weight of every response. The KL penalty that the paper folds into the reward is left to the caller.
    Variance unbiased, eps under the root, as in verl's masked whitening.
    """
    reward_B = _check_rewards(reward_B)
    if group_B is not None:
        reward_B = reward_B - _group_mean(reward_B, *_groups(group_B))
    weight_B = torch.ones_like(reward_B) if length_B is None else length_B.to(reward_B)
    return _normalise(reward_B, weight_B, eps).float()


def whiten(advantages_N: Tensor, mask_N: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit variance over the tokens in the mask, 0 elsewhere, float32 [N]. Unbiased variance, as PPO's
    usual implementations. Without spread (one token, equal values) all are 0."""
    mask_N = mask_N.bool()
    inside_N = torch.where(mask_N, advantages_N.double(), 0)
    return torch.where(mask_N, _normalise(inside_N, mask_N.double(), eps), 0).float()


def per_token(advantage_B: Tensor, offsets: Tensor) -> Tensor:
    """One advantage a response -> the same on each of its tokens, [N]."""
    return advantage_B[segment_ids(offsets)]


def signal_groups(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """bool [B]: the response's group has any spread of reward. Others have advantage 0 throughout; DAPO's dynamic
    sampling leaves them out and samples more (arXiv 2503.14476, eq. 11). Deviation: DAPO asks for 0 < correct < n,
    this for unequal rewards, which is the same for rewards of 0 and 1 and goes on working for others."""
    reward_B = _check_rewards(reward_B)
    index_B, count_G = _groups(group_B)
    highest_G = torch.zeros_like(count_G).scatter_reduce(0, index_B, reward_B, "amax", include_self=False)
    lowest_G = torch.zeros_like(count_G).scatter_reduce(0, index_B, reward_B, "amin", include_self=False)
    return (highest_G > lowest_G)[index_B]


def overlong_penalty(length_B: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft overlong punishment, float32 [B] in [-penalty, 0], added to the reward (arXiv 2503.14476, eq. 13).

    0 up to max_length - buffer tokens, from there linearly down to -penalty at max_length, and no lower. The paper has
    max_length 20480, buffer 4096 and penalty 1.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie between 1 and max_length={max_length} tokens")
    excess_B = (length_B - (max_length - buffer)).float()
    return -penalty * (excess_B / buffer).clamp(0, 1)


def _check_rewards(reward_B: Tensor) -> Tensor:
    bad = (~torch.isfinite(reward_B)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"the reward of row {row} is {float(reward_B[row])} ({len(bad)} of {len(reward_B)} are not finite); "
            "fix the verifier that scored it, or drop the row"
        )
    return reward_B.detach().double()


def _groups(group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Any labels -> index 0..G-1 of each response and each group's size (float64)."""
    _, index_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    return index_B, count_G.double()


def _group_mean(reward_B: Tensor, index_B: Tensor, count_G: Tensor) -> Tensor:
    return (torch.zeros_like(count_G).index_add(0, index_B, reward_B) / count_G)[index_B]


def _normalise(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    total = weight.sum()
    centred = values - (weight * values).sum() / total.clamp(min=1)
    variance = (weight * centred.square()).sum() / (total - 1).clamp(min=1)
    return centred / (variance + eps).sqrt()
