"""Losses and their gradients, against arithmetic a reader can follow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.objectives import (
    Objective,
    explained_variance,
    kl_penalty,
    policy_loss,
    policy_stats,
    token_weights,
    value_loss,
)
from trueup.rollouts import offsets_of

NAN = float("nan")


def run(objective, ratio, advantages, weights=None, lengths=None, keep=None, logprob=-1.0):
    """Loss, gradient by log-prob, and sums, at the given policy ratios."""
    ratio = torch.tensor(ratio)
    logprobs = torch.full_like(ratio, logprob).requires_grad_()
    loss, sums = policy_loss(
        objective,
        logprobs,
        logprob - ratio.log(),
        torch.tensor(advantages),
        torch.ones_like(ratio) if weights is None else torch.tensor(weights),
        offsets_of([len(ratio)] if lengths is None else lengths),
        torch.ones_like(ratio, dtype=torch.bool) if keep is None else torch.tensor(keep),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.tolist(), gradient.tolist(), sums


def test_ppo_clips_only_where_the_step_would_go_on_in_the_clipped_direction():
    loss, gradient, sums = run(Objective(), [1.0, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0])
    # A = 1: max(-r, -clip r); A = -1: max(r, clip r), with the clip at 0.8 and 1.2
    assert loss == pytest.approx([-1, -1.2, -0.5, 1.5, 0.8])
    # d(-A r) / d log pi = -A r where not clipped
    assert gradient == pytest.approx([-1, 0, -0.5, 1.5, 0])
    assert policy_stats(sums)["policy/clip_fraction"] == pytest.approx(2 / 5)


def test_clip_higher_raises_only_the_upper_bound():
    loss, gradient, _ = run(Objective(clip_low=0.2, clip_high=0.28), [1.25, 1.5, 0.5], [1.0, 1.0, -1.0])
    assert loss == pytest.approx([-1.25, -1.28, 0.8])
    assert gradient == pytest.approx([-1.25, 0, 0])


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_and_takes_their_gradient():
    loss, gradient, sums = run(Objective(dual_clip=3.0), [5.0, 2.5, 5.0], [-2.0, -2.0, 2.0])
    # A = -2: 2 r = 10 is bounded by 3 * 2, 5 is not; A = 2: the ordinary clip, -2 * 1.2
    assert loss == pytest.approx([6, 5, -2.4])
    assert gradient == pytest.approx([0, 5, 0])
    assert policy_stats(sums)["policy/clip_fraction"] == pytest.approx(2 / 3)


def test_the_mismatch_weight_multiplies_outside_the_clip_and_after_the_dual_clip():
    loss, gradient, _ = run(Objective(dual_clip=3.0), [1.5, 5.0, 1.1], [1.0, -2.0, 1.0], weights=[2.0, 0.5, 1.5])
    # 2 * -1.2 (not -min(2 * 1.5, 1.2)); 0.5 * 6 (not min(5, 6)); 1.5 * -1.1
    assert loss == pytest.approx([-2.4, 3, -1.65])
    assert gradient == pytest.approx([0, 0, -1.65])


def test_reinforce_is_minus_the_weighted_advantage_times_the_log_prob():
    loss, gradient, sums = run(Objective(kind="reinforce"), [1.0, 3.0], [2.0, -1.0], weights=[0.5, 1.0])
    assert loss == pytest.approx([1, -1])  # -0.5 * 2 * -1 and -1 * -1 * -1
    assert gradient == pytest.approx([-1, 1])  # -w A
    assert policy_stats(sums)["policy/clip_fraction"] == 0


def test_cispo_clips_the_ratio_as_a_weight_and_leaves_every_token_its_gradient():
    loss, gradient, sums = run(Objective(kind="cispo", clip_low=1.0, clip_high=2.0), [0.1, 2.0, 9.0], [1.0, -1.0, 1.0])
    assert gradient == pytest.approx([-0.1, 2, -3])  # -A min(r, 3)
    assert loss == pytest.approx([0.1, -2, 3])  # times log pi = -1
    assert policy_stats(sums)["policy/clip_fraction"] == pytest.approx(1 / 3)


def test_gspo_gives_every_token_the_ratio_of_its_whole_response():
    # geometric means: sqrt(1.1 * 0.9) = 0.99499; 1.5
    objective = Objective(kind="gspo", clip_low=0.2, clip_high=0.2, aggregation="sequence-mean")
    loss, gradient, sums = run(objective, [1.1, 0.9, 1.5], [1.0, 1.0, 1.0], lengths=[2, 1])
    mean = math.sqrt(0.99)
    assert loss == pytest.approx([-mean, -mean, -1.2])
    assert gradient == pytest.approx([-mean, -mean, 0])
    assert policy_stats(sums)["policy/clip_fraction"] == pytest.approx(1 / 3)


def test_gspo_leaves_dropped_tokens_out_of_the_responses_ratio():
    # kept ratios 1.1 and 1.0: the mean of their logs, not of three
    loss, gradient, _ = run(Objective(kind="gspo"), [1.1, 0.5, 1.0], [1.0] * 3, keep=[True, False, True])
    assert loss == pytest.approx([-math.sqrt(1.1), 0, -math.sqrt(1.1)])
    assert gradient == pytest.approx(loss)


def test_the_gradient_of_gspo_is_that_of_the_papers_sequence_objective():
    # J_i = s_i A_i with s_i = exp(mean log r): differentiated without any stop-gradient
    torch.manual_seed(0)
    old, advantage = torch.randn(7, dtype=torch.float64), torch.tensor([1.5, -0.5], dtype=torch.float64)
    logprobs = (old + 0.05 * torch.randn(7, dtype=torch.float64)).requires_grad_()
    ratio_B = torch.stack([(logprobs - old)[:4].mean().exp(), (logprobs - old)[4:].mean().exp()])
    (expected,) = torch.autograd.grad(-(ratio_B * advantage).sum() / 2, logprobs)
    offsets, keep = offsets_of([4, 3]), torch.ones(7, dtype=torch.bool)
    objective = Objective(kind="gspo", aggregation="sequence-mean")
    spread = advantage.repeat_interleave(offsets.diff())
    loss, _ = policy_loss(objective, logprobs, old, spread, torch.ones(7), offsets, keep)
    weights, denominator = token_weights("sequence-mean", keep, keep, offsets)
    (found,) = torch.autograd.grad((weights * loss).sum() / denominator, logprobs)
    assert torch.allclose(found, expected, atol=1e-6)


@given(
    st.sampled_from(["ppo", "reinforce"]),
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-2, 2), st.floats(0, 3)), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_gradients_agree_with_finite_differences(kind, tokens):
    objective = Objective(kind=kind, dual_clip=2.0 if kind == "ppo" else None)
    log_ratio, advantages, weights = (torch.tensor([token[i] for token in tokens]) for i in range(3))
    kinks = [math.log(value) for value in (0.8, 1.2, 2.0)]
    log_ratio += 0.02 * torch.tensor([any(abs(float(x) - kink) < 0.01 for kink in kinks) for x in log_ratio])
    old, keep = torch.full_like(log_ratio, -2.0), torch.ones_like(log_ratio, dtype=torch.bool)
    loss_at = lambda logprobs: policy_loss(  # noqa: E731
        objective, logprobs, old, advantages, weights, offsets_of([len(old)]), keep
    )[0]
    logprobs = (old + log_ratio).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_at(logprobs).sum(), logprobs)
    step = 1e-3
    with torch.no_grad():
        numeric = (loss_at(logprobs + step) - loss_at(logprobs - step)) / (2 * step)
    assert torch.allclose(gradient, numeric, atol=1e-2)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_what_stands_at_dropped_tokens_reaches_neither_loss_nor_gradient(kind):
    objective, keep = Objective(kind=kind), [True, False, True]
    clean = run(objective, [1.1, 1.0, 0.9], [1.0, 1.0, -1.0], keep=keep)
    dirty = run(objective, [1.1, NAN, 0.9], [1.0, NAN, -1.0], weights=[1.0, NAN, 1.0], keep=keep)
    assert clean[0][1] == clean[1][1] == 0
    assert dirty[0] == clean[0]
    assert dirty[1] == clean[1]
    assert policy_stats(dirty[2]) == policy_stats(clean[2])
    logprobs = torch.tensor([-1.0, NAN, -math.inf]).requires_grad_()
    loss, _ = policy_loss(
        objective,
        logprobs,
        torch.full((3,), -1.0),
        torch.ones(3),
        torch.ones(3),
        offsets_of([3]),
        torch.tensor([1, 0, 0]),
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1, 0, 0])


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_log_probs_however_far_apart_give_finite_losses_and_gradients(kind):
    logprobs = torch.tensor([-1e4, 0.0, -1.0]).requires_grad_()
    loss, sums = policy_loss(
        Objective(kind=kind),
        logprobs,
        torch.tensor([0.0, -1e4, -1.0]),
        torch.tensor([-1.0, -1.0, 1.0]),
        torch.ones(3),
        offsets_of([1, 2]),
        torch.ones(3, dtype=torch.bool),
    )
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value in policy_stats(sums).values())


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_strictly_on_policy_every_objective_has_the_policy_gradient(kind):
    _, gradient, sums = run(Objective(kind=kind), [1.0, 1.0], [2.0, -1.0], weights=[1.0, 0.5])
    assert gradient == pytest.approx([-2, 0.5])  # -w A
    assert policy_stats(sums) == {"policy/clip_fraction": 0, "policy/kl_old": 0}


def test_kl_old_is_the_mean_of_k3_over_kept_tokens_and_sums_add_over_micro_batches():
    _, _, first = run(Objective(), [2.0, 0.5], [0.0, 0.0])
    _, _, second = run(Objective(), [1.0, 4.0], [0.0, 0.0], keep=[True, False])
    both = {name: first[name] + second[name] for name in first}
    # (2 - 1 - ln 2) + (0.5 - 1 + ln 2) + 0 over three kept tokens
    assert policy_stats(both)["policy/kl_old"] == pytest.approx(0.5 / 3)
    assert not first["kl_old"].requires_grad
    empty = {name: 0.0 for name in first}
    assert policy_stats(empty) == {"policy/clip_fraction": 0, "policy/kl_old": 0}


# Responses of 3, 2 and 1 tokens; the second token of the first and the whole third are rejected.
LENGTHS = [3, 2, 1]
KEEP = torch.tensor([True, False, True, True, True, False])
MASK = torch.ones(6, dtype=torch.bool)


@pytest.mark.parametrize(
    "aggregation, stays, weights, denominator",
    [
        ("token-mean", False, [1, 0, 1, 1, 1, 0], 4),
        ("token-mean", True, [1, 0, 1, 1, 1, 0], 6),
        ("sequence-mean", False, [1 / 2, 0, 1 / 2, 1 / 2, 1 / 2, 0], 2),
        ("sequence-mean", True, [1 / 3, 0, 1 / 3, 1 / 2, 1 / 2, 0], 3),
        ("constant", False, [1, 0, 1, 1, 1, 0], 20),
        ("constant", True, [1, 0, 1, 1, 1, 0], 30),
    ],
)
def test_rejected_tokens_leave_the_denominator_unless_told_to_stay(aggregation, stays, weights, denominator):
    found = token_weights(aggregation, KEEP, MASK, offsets_of(LENGTHS), stays, constant_length=10)
    assert found[0].tolist() == pytest.approx(weights)
    assert found[1] == denominator


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
@pytest.mark.parametrize("stays", [False, True])
def test_numerators_and_denominators_of_micro_batches_add_up_to_the_whole(aggregation, stays):
    losses, offsets = torch.arange(1.0, 7.0), offsets_of(LENGTHS)
    weights, denominator = token_weights(aggregation, KEEP, MASK, offsets, stays, 10)
    numerators, denominators = 0.0, 0.0
    for start, end, lengths in ((0, 3, [3]), (3, 6, [2, 1])):
        part = token_weights(aggregation, KEEP[start:end], MASK[start:end], offsets_of(lengths), stays, 10)
        numerators += float((part[0] * losses[start:end]).sum())
        denominators += part[1]
    assert numerators == pytest.approx(float((weights * losses).sum()))
    assert denominators == denominator


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_with_every_token_rejected_the_denominator_is_zero(aggregation):
    weights, denominator = token_weights(aggregation, MASK & False, MASK, offsets_of(LENGTHS), constant_length=10)
    assert weights.tolist() == [0] * 6
    assert denominator == 0


def test_the_value_loss_takes_the_worse_of_the_free_and_the_clipped_value():
    values = torch.tensor([1.5, 1.1, 0.0]).requires_grad_()
    loss = value_loss(values, torch.ones(3), torch.tensor([2.0, 2.0, -1.0]), clip=0.2)
    # clipped to 1.2, 1.1, 0.8: errors max(0.5, 0.8)^2, 0.9^2, max(1, 1.8)^2
    assert loss.tolist() == pytest.approx([0.32, 0.405, 1.62])
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0, -0.9, 0])
    assert value_loss(values, torch.ones(3), torch.zeros(3), clip=None).tolist() == pytest.approx([1.125, 0.605, 0])


def test_explained_variance_compares_the_error_with_the_spread_of_the_returns():
    returns, mask = torch.tensor([0.0, 2.0, 9.0]), torch.tensor([True, True, False])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.ones(3), returns, mask) == 0
    # a constant error of 0.5 has no variance; errors of -3 and 3 have 9, the returns 1
    assert explained_variance(torch.tensor([-0.5, 1.5, 0.0]), returns, mask) == 1
    assert explained_variance(torch.tensor([3.0, -1.0, 0.0]), returns, mask) == pytest.approx(-8)
    assert explained_variance(torch.ones(3), torch.ones(3), mask) == 0
    assert explained_variance(torch.ones(3), torch.ones(3), mask & False) == 0


@pytest.mark.parametrize(
    "estimator, value, gradient",
    [
        ("k1", math.log(2), 1),  # -x with x = log(0.25 / 0.5) = -ln 2
        ("k2", math.log(2) ** 2 / 2, math.log(2)),  # -x
        ("k3", 0.5 - 1 + math.log(2), 0.5),  # 1 - e^x
    ],
)
def test_the_kl_estimators_have_the_values_and_gradients_worked_out_by_hand(estimator, value, gradient):
    logprobs = torch.tensor([math.log(0.5)]).requires_grad_()
    penalty = kl_penalty(logprobs, torch.tensor([math.log(0.25)]), estimator)
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx([value])
    assert logprobs.grad.tolist() == pytest.approx([gradient])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_kl_estimator_averages_to_about_the_kl_of_close_distributions(estimator):
    torch.manual_seed(0)
    logits = torch.randn(6)
    policy, reference = logits.log_softmax(0), (logits + 0.1 * torch.randn(6)).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    expected = float((policy.exp() * kl_penalty(policy, reference, estimator)).sum())
    assert expected == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(kind="grpo"), "kind='grpo' is unknown; valid: ppo, gspo, cispo, reinforce"),
        (dict(aggregation="mean"), "aggregation='mean' is unknown"),
        (dict(kl_estimator="k4"), "kl_estimator='k4' is unknown"),
        (dict(clip_low=1.2), "distances from a ratio of 1"),
        (dict(dual_clip=1.1), "must exceed 1 \\+ clip_high"),
        (dict(kind="gspo", dual_clip=3.0), "dual_clip belongs to kind=ppo"),
    ],
)
def test_an_objective_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Objective(**fields)


def test_unknown_names_are_refused_by_the_functions_too():
    with pytest.raises(ValueError, match="aggregation='mean' is unknown"):
        token_weights("mean", KEEP, MASK, offsets_of(LENGTHS))
    with pytest.raises(ValueError, match="needs constant_length"):
        token_weights("constant", KEEP, MASK, offsets_of(LENGTHS))
    with pytest.raises(ValueError, match="kl estimator 'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
