"""Rewards -> advantages, against arithmetic a reader can follow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.advantages import (
    gae,
    group_relative,
    overlong_penalty,
    per_token,
    place_terminal_reward,
    reinforce_plus_plus,
    rloo,
    signal_groups,
    whiten,
)
from trueup.rollouts import offsets_of

NAN = float("nan")
REWARD = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5])
GROUP = torch.tensor([7, 7, 7, 7, 2, 2, 9])  # four, two, and one alone


def loop_gae(rewards, values, gamma, lam):
    """The definition, one response at a time."""
    advantages, following, value_after = [0.0] * len(values), 0.0, 0.0
    for t in range(len(values) - 1, -1, -1):
        following = rewards[t] + gamma * value_after - values[t] + gamma * lam * following
        advantages[t], value_after = following, values[t]
    return advantages


def test_gae_of_three_tokens_is_the_one_worked_out_by_hand():
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.4, 0.8])
    advantages, returns = gae(rewards, values, offsets_of([3]), gamma=0.9, lam=0.5)
    # deltas: 0.9 * 0.4 - 0.5 = -0.14; 0.9 * 0.8 - 0.4 = 0.32; 1 - 0.8 = 0.2; factor 0.45
    # A_3 = 0.2; A_2 = 0.32 + 0.45 * 0.2 = 0.41; A_1 = -0.14 + 0.45 * 0.41 = 0.0445
    assert advantages.tolist() == pytest.approx([0.0445, 0.41, 0.2])
    assert returns.tolist() == pytest.approx([0.5445, 0.81, 1.0])


@given(st.lists(st.integers(0, 9), max_size=6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_gae_agrees_with_a_plain_double_loop(lengths, gamma, lam, seed):
    draw, offsets = torch.Generator().manual_seed(seed), offsets_of(lengths)
    rewards, values = torch.randn(2, int(offsets[-1]), generator=draw)
    advantages, returns = gae(rewards, values, offsets, gamma, lam)
    expected = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        expected += loop_gae(rewards[start:end].tolist(), values[start:end].tolist(), gamma, lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)
    assert returns.tolist() == pytest.approx((advantages + values).tolist())
    assert advantages.dtype == torch.float32


def test_gae_with_lambda_and_gamma_one_returns_the_reward_to_go():
    offsets = offsets_of([4, 2])
    rewards = place_terminal_reward(torch.tensor([1.0, -1.0]), offsets)
    _, returns = gae(rewards, torch.randn(6), offsets, 1.0, 1.0)
    assert returns.tolist() == pytest.approx([1, 1, 1, 1, -1, -1], abs=1e-5)


def test_gae_steps_over_tokens_the_policy_did_not_choose():
    values = torch.tensor([0.5, 99.0, 99.0, 0.4, 0.8, 99.0])
    mask = torch.tensor([True, False, False, True, True, False])
    offsets = offsets_of([6])
    rewards = place_terminal_reward(torch.tensor([1.0]), offsets, mask)
    assert rewards.tolist() == [0, 0, 0, 0, 1, 0]
    advantages, returns = gae(rewards, values, offsets, 0.9, 0.5, mask)
    assert advantages.tolist() == pytest.approx([0.0445, 0, 0, 0.41, 0.2, 0])  # as without them
    assert returns.tolist() == pytest.approx([0.5445, 0, 0, 0.81, 1.0, 0])
    with pytest.raises(ValueError, match="outside the loss mask carries a reward"):
        gae(torch.ones(6), values, offsets, 0.9, 0.5, mask)


def test_the_terminal_reward_stands_on_the_last_token_and_nowhere_in_an_empty_response():
    rewards = place_terminal_reward(torch.tensor([1.0, 5.0, -2.0]), offsets_of([2, 0, 1]))
    assert rewards.tolist() == [0, 1, -2]


def test_grpo_subtracts_the_groups_mean_and_divides_by_its_unbiased_std():
    advantages = group_relative(REWARD, GROUP)
    # 1 0 0 1: mean 0.5, variance 4 * 0.25 / 3; 1 0: mean 0.5, variance 2 * 0.25 / 1; alone: nothing to compare with
    four, two = 0.5 / math.sqrt(1 / 3), 0.5 / math.sqrt(0.5)
    assert advantages.tolist() == pytest.approx([four, -four, -four, four, two, -two, 0], rel=1e-4)


def test_dr_grpo_only_subtracts_the_mean():
    advantages = group_relative(REWARD, GROUP, normalise_std=False)
    assert advantages.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.5, -0.5, 0])


def test_a_group_without_spread_gives_zero_and_not_amplified_rounding():
    advantages = group_relative(torch.full((7,), 0.1), torch.zeros(7))
    assert advantages.abs().max() < 1e-6


def test_rloo_compares_each_reward_with_the_mean_of_the_others():
    # 1 against (0 + 0 + 1) / 3; 0 against 2/3; 1 against 0 and 0 against 1
    assert rloo(REWARD, GROUP).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, -1, 0])


def test_reinforce_plus_plus_normalises_over_the_batch():
    # rewards 1, 0, 2: mean 1, unbiased variance 1
    assert reinforce_plus_plus(torch.tensor([1.0, 0.0, 2.0])).tolist() == pytest.approx([0, -1, 1])


def test_reinforce_plus_plus_over_tokens_counts_a_response_by_its_length():
    # tokens 1 1 1 0: mean 0.75, variance (3 * 0.0625 + 0.5625) / 3 = 0.25
    advantages = reinforce_plus_plus(torch.tensor([1.0, 0.0]), length_B=torch.tensor([3, 1]))
    assert advantages.tolist() == pytest.approx([0.5, -1.5])


def test_reinforce_plus_plus_baseline_subtracts_the_groups_mean_and_divides_by_the_batchs_std():
    # groups (1, 0) and (4, 0): centred 0.5, -0.5, 2, -2; mean 0, variance (0.25 + 0.25 + 4 + 4) / 3
    advantages = reinforce_plus_plus(torch.tensor([1.0, 0.0, 4.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    std = math.sqrt(8.5 / 3)
    assert advantages.tolist() == pytest.approx([0.5 / std, -0.5 / std, 2 / std, -2 / std])


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_group_advantages_sum_to_zero_in_every_group_and_do_not_depend_on_labels_or_order(rows):
    reward, group = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    for estimate in (group_relative, rloo):
        advantages = estimate(reward, group)
        assert torch.isfinite(advantages).all()
        for label in group.unique():
            assert float(advantages[group == label].sum()) == pytest.approx(0, abs=2e-3)
        assert torch.allclose(estimate(reward, group * -5 + 3), advantages)
        assert torch.allclose(estimate(reward.flip(0), group.flip(0)).flip(0), advantages, atol=1e-4)


def test_whitening_gives_zero_mean_and_unit_variance_inside_the_mask_and_zero_outside():
    mask = torch.tensor([True, True, False, True])
    whitened = whiten(torch.tensor([1.0, 2.0, NAN, 3.0]), mask)
    assert whitened.tolist() == pytest.approx([-1, 0, 0, 1])
    assert whiten(torch.tensor([5.0, 1.0]), torch.tensor([True, False])).tolist() == [0, 0]
    assert whiten(torch.ones(3), torch.zeros(3)).tolist() == [0, 0, 0]


def test_an_advantage_is_spread_over_all_tokens_of_its_response():
    assert per_token(torch.tensor([1.0, 2.0, 3.0]), offsets_of([2, 0, 1])).tolist() == [1, 1, 3]


def test_groups_with_any_spread_of_reward_carry_signal():
    reward = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 3.0])
    group = torch.tensor([4, 4, 1, 1, 2, 2, 8])
    assert signal_groups(reward, group).tolist() == [False, False, True, True, False, False, False]


def test_the_overlong_penalty_grows_from_the_buffers_start_to_the_limit():
    # DAPO: limit 20480, buffer 4096. At 18432: (16384 - 18432) / 4096 = -0.5
    length = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert overlong_penalty(length, 20480, 4096, 1.0).tolist() == pytest.approx([0, 0, -0.5, -1, -1])
    assert overlong_penalty(length, 20480, 4096, 0.2)[2] == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="buffer=0 must lie between 1 and max_length=10"):
        overlong_penalty(length, 10, 0, 1.0)


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize(
    "estimate",
    [
        lambda reward: group_relative(reward, torch.zeros(3)),
        lambda reward: rloo(reward, torch.zeros(3)),
        lambda reward: reinforce_plus_plus(reward),
        lambda reward: signal_groups(reward, torch.zeros(3)),
        lambda reward: place_terminal_reward(reward, offsets_of([1, 1, 1])),
    ],
    ids=["group_relative", "rloo", "reinforce_plus_plus", "signal_groups", "place_terminal_reward"],
)
def test_a_reward_that_is_not_a_number_is_refused_by_row(estimate, bad):
    with pytest.raises(ValueError, match=rf"reward of row 1 is {bad} \(1 of 3 are not finite\)"):
        estimate(torch.tensor([1.0, bad, 0.0]))


def test_an_empty_batch_gives_empty_advantages():
    none, no_group = torch.empty(0), torch.empty(0, dtype=torch.int32)
    for estimate in (group_relative, rloo, reinforce_plus_plus, signal_groups):
        assert len(estimate(none, no_group)) == 0
    assert len(gae(none, none, offsets_of([0, 0]))[0]) == 0
    assert len(place_terminal_reward(none, offsets_of([]))) == 0
