"""The statistics of the mismatch, against arithmetic a reader can follow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.mismatch import _quantiles, _student_t975, measure
from trueup.rollouts import offsets_of

NAN = float("nan")


def logs(*probabilities):
    return torch.tensor([math.log(value) for value in probabilities], dtype=torch.float64)


# Two responses of two tokens and one of one. rho = 1, 2, 0.5, 1, 1.5.
MU = logs(0.5, 0.25, 0.5, 1.0, 0.2)
PI = logs(0.5, 0.50, 0.25, 1.0, 0.3)
OFFSETS = offsets_of([2, 2, 1])


def test_the_statistics_of_a_small_batch_are_those_worked_out_by_hand():
    stats = measure(MU, PI, OFFSETS)
    # log rho = 0, ln 2, -ln 2, 0, ln 1.5
    assert stats["mismatch/kl_k1"] == pytest.approx(-math.log(1.5) / 5)
    # rho - 1 - log rho = 0, 1 - ln 2, -0.5 + ln 2, 0, 0.5 - ln 1.5
    assert stats["mismatch/kl_k3"] == pytest.approx((1 - math.log(1.5)) / 5)
    # |pi - mu| = 0, 0.25, 0.25, 0, 0.1
    assert stats["mismatch/prob_diff_mean"] == pytest.approx(0.6 / 5)
    assert stats["mismatch/prob_diff_max"] == pytest.approx(0.25)
    assert stats["mismatch/prob_diff_q99"] == pytest.approx(0.25)
    assert stats["mismatch/log_rho_abs_mean"] == pytest.approx((2 * math.log(2) + math.log(1.5)) / 5)
    # |log rho| in order: 0, 0, ln 1.5, ln 2, ln 2; the ranks of 50, 90, 99% are 3, 5, 5
    assert stats["mismatch/log_rho_abs_q50"] == pytest.approx(math.log(1.5))
    assert stats["mismatch/log_rho_abs_q90"] == pytest.approx(math.log(2))
    assert stats["mismatch/log_rho_abs_q99"] == pytest.approx(math.log(2))
    assert stats["mismatch/log_rho_abs_max"] == pytest.approx(math.log(2))
    assert stats["mismatch/rho_mean"] == pytest.approx(6 / 5)
    assert stats["mismatch/rho_max"] == pytest.approx(2)
    # tokens: 6^2 / (5 (1 + 4 + 0.25 + 1 + 2.25)); responses have products 2, 0.5, 1.5: 4^2 / (3 (4 + 0.25 + 2.25))
    assert stats["mismatch/ess_token"] == pytest.approx(36 / (5 * 8.5))
    assert stats["mismatch/ess_sequence"] == pytest.approx(16 / (3 * 6.5))
    assert stats["mismatch/missing_fraction"] == 0
    assert stats["mismatch/tokens"] == 5
    # sums of rho 3, 1.5, 1.5 against 1.2 a token: residuals 0.6, -0.9, 0.3; variance 3/2 (0.36 + 0.81 + 0.09) / 25
    half = 4.3027 * math.sqrt(1.5 * 1.26 / 25)
    assert stats["mismatch/rho_mean_low"] == pytest.approx(1.2 - half, rel=1e-4)
    assert stats["mismatch/rho_mean_high"] == pytest.approx(1.2 + half, rel=1e-4)


def test_kl_per_entropy_is_k3_over_the_mean_entropy():
    stats = measure(MU, PI, OFFSETS, entropy_N=torch.tensor([0.0, 1.0, 2.0, 0.5, 1.5]))
    assert stats["mismatch/kl_per_entropy"] == pytest.approx((1 - math.log(1.5)) / 5 / 1.0)
    assert measure(MU, PI, OFFSETS, entropy_N=torch.zeros(5))["mismatch/kl_per_entropy"] == 0
    assert "mismatch/kl_per_entropy" not in measure(MU, PI, OFFSETS)


def test_masked_and_missing_tokens_count_nowhere_but_in_the_missing_fraction():
    clean = measure(MU, PI, OFFSETS)
    mu = torch.cat([MU[:2], torch.tensor([NAN, -9.0, -math.inf]).double(), MU[2:]])
    pi = torch.cat([PI[:2], torch.tensor([-1.0, -0.1, -1.0]).double(), PI[2:]])
    mask = torch.tensor([True, True, True, False, True, True, True, True])
    stats = measure(mu, pi, offsets_of([5, 2, 1]), mask)
    # of seven tokens under the mask two are missing
    assert stats.pop("mismatch/missing_fraction") == pytest.approx(2 / 7)
    clean.pop("mismatch/missing_fraction")
    assert stats == pytest.approx(clean)


def test_a_learner_log_prob_can_be_missing_too():
    stats = measure(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, NAN]), offsets_of([2]))
    assert stats["mismatch/missing_fraction"] == 0.5
    assert stats["mismatch/kl_k3"] == 0


def test_numpy_and_padded_inputs_give_the_same_as_packed_tensors():
    packed = measure(MU, PI, OFFSETS, entropy_N=torch.arange(5.0))
    assert measure(MU.numpy(), PI.numpy(), OFFSETS.numpy(), entropy_N=np.arange(5.0)) == packed
    # left and right padding, with NaN in it: what is outside the mask is never looked at
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]])
    pad = lambda values: torch.full((3, 3), NAN, dtype=torch.float64).masked_scatter(mask.bool(), values)  # noqa: E731
    assert measure(pad(MU), pad(PI), None, mask, pad(torch.arange(5.0).double())) == packed


@pytest.mark.parametrize(
    "mu, mask, lengths, missing",
    [
        ([], None, [], 0.0),
        ([], None, [0, 0], 0.0),
        ([-1.0, -1.0], [False, False], [2], 0.0),
        ([NAN, NAN], None, [2], 1.0),
    ],
    ids=["no responses", "empty responses", "all masked", "all missing"],
)
def test_with_nothing_to_measure_the_statistics_are_those_of_agreement_and_tokens_is_zero(mu, mask, lengths, missing):
    mask = None if mask is None else torch.tensor(mask)
    full = measure(MU, PI, OFFSETS, entropy_N=torch.ones(5))
    stats = measure(torch.tensor(mu), torch.zeros(len(mu)), offsets_of(lengths), mask, entropy_N=torch.ones(len(mu)))
    assert stats.keys() == full.keys()
    assert stats["mismatch/missing_fraction"] == missing
    assert stats["mismatch/tokens"] == 0
    ones = {"rho_mean", "rho_mean_low", "rho_mean_high", "rho_max", "ess_token", "ess_sequence"}
    for name, value in stats.items():
        if name not in ("mismatch/missing_fraction", "mismatch/tokens"):
            assert value == (name.removeprefix("mismatch/") in ones), name


def test_one_response_alone_never_excludes_an_expected_ratio_of_one():
    stats = measure(MU[:2], PI[:2], offsets_of([2]))
    assert (stats["mismatch/rho_mean_low"], stats["mismatch/rho_mean_high"]) == (1, pytest.approx(1.5))


@given(
    st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0), st.booleans()), max_size=30),
    st.lists(st.integers(0, 5), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_no_log_probs_however_extreme_give_an_infinite_or_undefined_statistic(tokens, cuts):
    mu, pi = (torch.tensor([token[i] for token in tokens], dtype=torch.float32) for i in (0, 1))
    mask = torch.tensor([token[2] for token in tokens], dtype=torch.bool)
    borders = sorted(min(cut * 6, len(tokens)) for cut in cuts)
    stats = measure(mu, pi, torch.tensor([0, *borders, len(tokens)]), mask, entropy_N=-mu)
    assert all(math.isfinite(value) for value in stats.values()), stats
    assert stats["mismatch/kl_k3"] >= 0
    assert 0 < stats["mismatch/ess_token"] <= 1 + 1e-9
    assert 0 < stats["mismatch/ess_sequence"] <= 1 + 1e-9
    assert stats["mismatch/rho_mean_low"] <= stats["mismatch/rho_mean"] <= stats["mismatch/rho_mean_high"]


def test_exact_agreement_shows_no_mismatch_at_all():
    stats = measure(MU, MU, OFFSETS)
    assert stats["mismatch/kl_k1"] == stats["mismatch/kl_k3"] == stats["mismatch/prob_diff_max"] == 0
    assert stats["mismatch/rho_mean_low"] == stats["mismatch/rho_mean"] == stats["mismatch/rho_mean_high"] == 1
    assert stats["mismatch/ess_token"] == stats["mismatch/ess_sequence"] == pytest.approx(1)


def test_k3_keeps_its_digits_where_float32_would_lose_them():
    mu = torch.full((1000,), -1.0, dtype=torch.float64)
    assert measure(mu, mu + 1e-6, offsets_of([1000]))["mismatch/kl_k3"] == pytest.approx(0.5e-12, rel=1e-3)


def test_the_sequence_ess_survives_products_that_overflow():
    # products e^400 and e^-400: one response carries all the weight, 1 of 2
    mu = torch.full((200,), -5.0)
    pi = mu + torch.cat([torch.full((100,), 4.0), torch.full((100,), -4.0)])
    assert measure(mu, pi, offsets_of([100, 100]))["mismatch/ess_sequence"] == pytest.approx(0.5)


def test_a_response_without_a_measured_token_is_no_response():
    with_empty = measure(torch.cat([MU, torch.tensor([NAN])]), torch.cat([PI, PI[:1]]), offsets_of([0, 2, 2, 0, 1, 1]))
    assert with_empty.pop("mismatch/missing_fraction") == pytest.approx(1 / 6)
    without = measure(MU, PI, OFFSETS)
    without.pop("mismatch/missing_fraction")
    assert with_empty == pytest.approx(without)


def test_the_interval_of_the_mean_ratio_covers_one_in_about_95_of_100_exactly_sampled_batches():
    # Tokens truly drawn from mu, so E_mu[rho] = 1; the size of pi's error differs by response, as contexts do.
    draw, covered, runs = torch.Generator().manual_seed(7), 0, 400
    offsets = offsets_of([5, 20, 35] * 20)
    tokens, sizes = int(offsets[-1]), offsets.diff()
    for _ in range(runs):
        logits = torch.randn(tokens, 8, generator=draw)
        size_B = 0.02 + 0.1 * torch.rand(60, generator=draw)
        noise = torch.randn(tokens, 8, generator=draw) * size_B.repeat_interleave(sizes)[:, None]
        mu, pi = logits.log_softmax(-1), (logits + noise).log_softmax(-1)
        ids = torch.multinomial(mu.exp(), 1, generator=draw)
        stats = measure(mu.gather(1, ids)[:, 0], pi.gather(1, ids)[:, 0], offsets)
        covered += stats["mismatch/rho_mean_low"] <= 1 <= stats["mismatch/rho_mean_high"]
    assert 0.92 <= covered / runs <= 0.98  # 95% with a binomial deviation of 1.1%


def test_the_interval_takes_the_response_and_not_the_token_as_its_unit():
    # Every token of a response shares its ratio: 100 tokens know no more than one.
    ratio_B = torch.tensor([0.9, 1.1, 1.0, 1.05, 0.95])
    short, long = offsets_of([1] * 5), offsets_of([100] * 5)
    widths = []
    for offsets in (short, long):
        log_rho = ratio_B.log().repeat_interleave(offsets.diff())
        stats = measure(torch.full_like(log_rho, -2.0), log_rho - 2.0, offsets)
        widths.append(stats["mismatch/rho_mean_high"] - stats["mismatch/rho_mean_low"])
    assert widths[0] == pytest.approx(widths[1], rel=1e-5)


@pytest.mark.parametrize("freedom, exact", [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_student_t_is_within_a_percent(freedom, exact):
    assert _student_t975(freedom) == pytest.approx(exact, rel=0.01)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_quantiles_are_nearest_rank_and_observed_also_with_ties(numbers):
    values = torch.tensor(numbers, dtype=torch.float64)
    ordered = sorted(numbers)
    expected = [ordered[max(1, math.ceil(q * len(numbers))) - 1] for q in (0.5, 0.9, 0.99)]
    assert [float(value) for value in _quantiles(values, 0.5, 0.9, 0.99)] == expected


def test_quantiles_of_more_values_than_torch_quantile_takes():
    values = torch.arange(17_000_000, dtype=torch.float32)
    with pytest.raises(RuntimeError):
        torch.quantile(values, 0.5)
    assert float(_quantiles(values, 0.5)[0]) == 8_499_999


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(learner=PI[:4]), r"learner_logprobs_N has shape \(4,\) but sampler_logprobs_N has \(5,\)"),
        (dict(mask=torch.ones(6)), "loss_mask_N has shape"),
        (dict(entropy=torch.ones(6)), "entropy_N has shape"),
        (dict(offsets=offsets_of([2, 2])), r"offsets must rise from 0 to the number of tokens, 5.*running from 0 to 4"),
        (dict(offsets=torch.tensor([0, 4, 2, 5])), "offsets must rise"),
        (dict(offsets=None), "need loss_mask_N"),
        (dict(offsets=None, mask=torch.ones(5)), r"expected padded \[B, T\] with offsets=None"),
        (dict(sampler=MU[None]), "for padded tensors pass offsets=None and loss_mask_N"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_what_was_given_and_expected(change, message):
    inputs = dict(sampler=MU, learner=PI, offsets=OFFSETS, mask=None, entropy=None) | change
    with pytest.raises(ValueError, match=message):
        measure(inputs["sampler"], inputs["learner"], inputs["offsets"], inputs["mask"], inputs["entropy"])
