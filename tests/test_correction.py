"""The field's own presets worked out by hand, filters, and the properties all corrections share. Peers: test_presets.py."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.correction import PRESETS, Correction, Filter, add_counts, correct, fractions, preset
from trueup.rollouts import offsets_of

NAN = float("nan")

# Three responses: rho = (1, 4, 0.25), (3, 1), (0.4, 6). Products 1, 3, 2.4; geometric means 1, sqrt 3, sqrt 2.4.
RHO = torch.tensor([1.0, 4.0, 0.25, 3.0, 1.0, 0.4, 6.0], dtype=torch.float64)
OFFSETS = offsets_of([3, 2, 2])
MU = torch.full((7,), math.log(0.1), dtype=torch.float64)
PI = MU + RHO.log()
ALL = torch.ones(7, dtype=torch.bool)


def apply(correction, rho=RHO, offsets=OFFSETS, mask=None, advantages=None):
    mu = torch.full((len(rho),), math.log(0.1), dtype=torch.float64)
    mask = torch.ones(len(rho), dtype=torch.bool) if mask is None else mask
    return correct(preset(correction), mu, mu + rho.log(), offsets, mask, advantages)


BY_HAND = {
    "none": [1, 1, 1, 1, 1, 1, 1],
    "is": [1, 4, 0.25, 3, 1, 0.4, 6],
    "ppo-is": [1, 1, 1, 1, 1, 1, 1],
    "tis": [1, 2, 0.25, 2, 1, 0.4, 2],  # min(rho, 2); nothing is cut from below
    "mis": [1, 0, 0.25, 0, 1, 0.4, 0],  # rho where rho <= 2
    "icepop": [1, 4, 0, 3, 1, 0, 0],  # rho where 0.5 <= rho <= 5
    "sequence-tis": [1, 1, 1, 2, 2, 2, 2],  # min(product, 2) of 1, 3, 2.4
    "sequence-mis": [1, 1, 1, 0, 0, 0, 0],  # the product where it is <= 2
    "geometric-mask": [1, 1, 1, 0, 0, 0, 0],  # sqrt 3 and sqrt 2.4 lie outside [0.98, 1.02]
}


@pytest.mark.parametrize("name", BY_HAND)
def test_each_preset_gives_the_weights_worked_out_by_hand(name):
    found = apply(name)
    assert found.weights_N.tolist() == pytest.approx(BY_HAND[name], abs=1e-6)
    assert found.keep_N.tolist() == [weight > 0 for weight in BY_HAND[name]]
    assert found.weights_N.dtype == torch.float32


@pytest.mark.parametrize(
    "name, truncated, masked, mean",
    [
        ("none", 0, 0, 1),
        ("is", 0, 0, 15.65 / 7),
        ("tis", 3 / 7, 0, 8.65 / 7),
        ("mis", 0, 3 / 7, 2.65 / 7),
        ("icepop", 0, 3 / 7, 9 / 7),
        ("sequence-tis", 4 / 7, 0, 11 / 7),
        ("sequence-mis", 0, 4 / 7, 3 / 7),
    ],
)
def test_the_fractions_are_shares_of_the_valid_tokens_with_rejected_weights_as_zero(name, truncated, masked, mean):
    stats = apply(name).stats
    assert stats["correction/truncated_fraction"] == pytest.approx(truncated)
    assert stats["correction/masked_fraction"] == pytest.approx(masked)
    assert stats["correction/weight_mean"] == pytest.approx(mean)


def test_a_geometric_ratio_inside_the_bounds_is_the_weight():
    # rho = 1.02, 1 has the geometric mean sqrt 1.02 = 1.00995
    found = apply("geometric-mask", torch.tensor([1.02, 1.0], dtype=torch.float64), offsets_of([2]))
    assert found.weights_N.tolist() == pytest.approx([math.sqrt(1.02)] * 2)


def test_truncation_can_also_bound_from_below_and_masks_keep_their_bounds():
    assert apply({"preset": "tis", "low": 0.5}).weights_N.tolist() == pytest.approx([1, 2, 0.5, 2, 1, 0.5, 2])
    on_the_bound = apply(Correction(bound="mask", low=0.5, high=1.0), torch.tensor([1.0, 1.0]), offsets_of([2]))
    assert on_the_bound.keep_N.all()


def test_a_missing_log_prob_is_dropped_counted_and_left_out_of_the_product():
    mu = torch.tensor([-1.0, NAN, -1.0, -1.0, -math.inf], dtype=torch.float64)
    pi = torch.tensor([-1.0, -1.0, -1.0 + math.log(1.5), NAN, -1.0], dtype=torch.float64)
    found = correct(preset("sequence-tis"), mu, pi, offsets_of([5]), torch.ones(5, dtype=torch.bool))
    # the product of what is known is 1 * 1.5
    assert found.weights_N.tolist() == pytest.approx([1.5, 0, 1.5, 0, 0])
    assert found.valid_N.tolist() == found.keep_N.tolist() == [True, False, True, False, False]
    assert (found.counts["tokens"], found.counts["valid"]) == (5, 2)
    # and the mean of what is known is (0 + ln 1.5) / 2
    geometric = correct(Correction("geometric", "none"), mu, pi, offsets_of([5]), torch.ones(5, dtype=torch.bool))
    assert geometric.weights_N.tolist() == pytest.approx([math.sqrt(1.5), 0, math.sqrt(1.5), 0, 0])


def test_tokens_outside_the_loss_mask_have_no_weight_and_no_part_in_the_product():
    mask = torch.tensor([True, False, True, True, True, True, False])
    found = apply("sequence-tis", mask=mask)
    # products 1 * 0.25, 3 * 1, 0.4
    assert found.weights_N.tolist() == pytest.approx([0.25, 0, 0.25, 2, 2, 0.4, 0])
    assert found.counts["tokens"] == 5
    assert found.denominator_N.tolist() == mask.tolist()


def test_ppo_is_needs_no_recomputed_log_probs_but_drops_what_the_sampler_did_not_report():
    found = correct(preset("ppo-is"), torch.tensor([-1.0, NAN]), None, offsets_of([2]), torch.ones(2, dtype=torch.bool))
    assert found.weights_N.tolist() == [1, 0]
    with pytest.raises(ValueError, match="needs learner_logprobs_N"):
        correct(preset("tis"), MU, None, OFFSETS, ALL)


FILTERS = {
    # rho = (1, 4, 0.25), (3, 1), (0.4, 6)
    "ratio of a token": (Filter("ratio", low=0.3, high=5), [1, 1, 0, 1, 1, 1, 0]),
    "k1 = -log rho": (Filter("k1", high=1), [1, 1, 0, 1, 1, 1, 1]),  # only ln 4 = 1.39 is above
    "k2 = (log rho)^2 / 2": (Filter("k2", high=0.9), [1, 0, 0, 1, 1, 1, 0]),  # .96 .96 .60 .42 1.61
    "k3 = rho - 1 - log rho": (Filter("k3", high=1), [1, 0, 1, 1, 1, 1, 0]),  # 0 1.61 .64 .90 0 .32 3.2
    "prob_diff = pi - mu, signed": (Filter("prob_diff", low=-0.07, high=0.25), [1, 0, 0, 1, 1, 1, 0]),
    "product": (Filter("ratio", "sum", low=0.5, high=2.5), [1, 1, 1, 0, 0, 1, 1]),  # 1, 3, 2.4
    "geometric mean": (Filter("ratio", "mean", high=1.6), [1, 1, 1, 0, 0, 1, 1]),  # 1, 1.73, 1.55
    "largest ratio": (Filter("ratio", "max", high=3.5), [0, 0, 0, 1, 1, 0, 0]),  # 4, 3, 6
    "mean k3": (Filter("k3", "mean", high=0.8), [1, 1, 1, 1, 1, 0, 0]),  # .75, .45, 1.76
    "sum k2": (Filter("k2", "sum", high=1.95), [1, 1, 1, 1, 1, 0, 0]),  # 1.92, .60, 2.03
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_drops_what_was_worked_out_by_hand(name):
    item, keep = FILTERS[name]
    found = apply(Correction(level="none", filters=(item,)))
    assert found.keep_N.tolist() == [bool(value) for value in keep]
    assert found.weights_N.tolist() == keep


def test_filters_judge_raw_ratios_and_combine_with_the_bound():
    found = apply(Correction(high=2.0, filters=(Filter("ratio", high=3.5), Filter("k1", high=1.0))))
    assert found.weights_N.tolist() == pytest.approx([1, 0, 0, 2, 1, 0.4, 0])
    assert found.stats["correction/truncated_fraction"] == pytest.approx(1 / 7)  # cut and kept
    assert found.stats["correction/masked_fraction"] == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    "sign, keep",
    [("any", [0, 0, 0, 1, 1, 0, 0]), ("negative", [0, 0, 0, 1, 1, 1, 1]), ("positive", [1, 1, 1, 1, 1, 0, 1])],
)
def test_a_filter_on_one_sign_of_the_advantage_leaves_the_others_alone(sign, keep):
    item = Filter("k3", "mean", high=0.5, advantage=sign)  # means .75, .45, 1.76
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 0.0])  # 0 has no sign
    found = apply(Correction(level="none", filters=(item,)), advantages=advantages)
    assert found.keep_N.tolist() == [bool(value) for value in keep]
    if sign != "any":
        with pytest.raises(ValueError, match="needs advantages_N"):
            apply(Correction(level="none", filters=(item,)))


def test_an_impossible_log_prob_counts_as_probability_one_in_prob_diff():
    # A placeholder of 5.0 is no probability of e^5: |1 - 0.5| = 0.5
    item = Filter("prob_diff", low=-0.6)
    found = correct(
        Correction("none", filters=(item,)), torch.tensor([5.0]), torch.tensor([0.5]).log(), offsets_of([1])
    )
    assert found.keep_N.tolist() == [True]


def test_counts_tell_responses_that_were_dropped_whole():
    counts = apply("sequence-mis").counts
    assert (counts["responses"], counts["responses_dropped"]) == (3, 2)


def test_counts_of_micro_batches_add_up_to_the_stats_of_the_whole():
    parts = [apply("tis", RHO[:3], offsets_of([3])), apply("tis", RHO[3:], offsets_of([2, 2]))]
    assert fractions(add_counts(part.counts for part in parts)) == pytest.approx(apply("tis").stats)
    assert apply("tis", RHO[:0], offsets_of([])).stats == dict.fromkeys(parts[0].stats, 0.0)


corrections = st.sampled_from(
    [
        *PRESETS.values(),
        Correction("geometric", "truncate", 0.5, 2),
        Correction("geometric", "none"),
        Correction("sequence", "none"),
        Correction("token", "mask", 0.1, 1.5, filters=(Filter("k3", "max", high=2.0),)),
        Correction(
            level="none", filters=(Filter("prob_diff", "mean", low=-0.1, high=0.1), Filter("ratio", "sum", 0.1, 9))
        ),
    ]
)


@st.composite
def batches(draw, apart=30.0):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    numbers = st.floats(-apart, 0, width=32)
    tokens = [
        draw(st.tuples(numbers, numbers, st.booleans(), st.booleans(), st.sampled_from([-1.0, 0.0, 2.0])))
        for _ in range(sum(lengths))
    ]
    mu = torch.tensor([token[0] if token[2] or token[3] else NAN for token in tokens], dtype=torch.float32)
    pi = torch.tensor([token[1] for token in tokens], dtype=torch.float32)
    mask = torch.tensor([token[2] for token in tokens], dtype=torch.bool)
    return mu, pi, offsets_of(lengths), mask, torch.tensor([token[4] for token in tokens], dtype=torch.float32)


def rows(values, offsets):
    return [values[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


@given(corrections, batches())
@settings(max_examples=100, deadline=None)
def test_exactly_on_policy_every_weight_is_one_and_every_known_token_is_kept(correction, batch):
    mu, _, offsets, mask, advantages = batch
    found = correct(correction, mu, mu, offsets, mask, advantages)
    valid = mask & torch.isfinite(mu)
    assert torch.equal(found.keep_N, valid)
    assert torch.equal(found.weights_N, valid.float())


@given(corrections, batches(apart=1e4))
@settings(max_examples=100, deadline=None)
def test_log_probs_however_far_apart_give_finite_weights_that_vanish_where_dropped(correction, batch):
    found = correct(correction, *batch)
    assert torch.isfinite(found.weights_N).all()
    assert (found.weights_N[~found.keep_N] == 0).all()
    assert not found.keep_N[~batch[3]].any()
    assert not found.keep_N[batch[0].isnan()].any()
    assert all(math.isfinite(value) for value in found.stats.values())


@given(corrections, batches(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_permuting_responses_permutes_the_result_and_splitting_the_batch_does_not_change_it(correction, batch, random):
    mu, pi, offsets, mask, advantages = batch
    whole = correct(correction, *batch)
    order = list(range(len(offsets) - 1))
    random.shuffle(order)
    cut = lambda values: torch.cat([rows(values, offsets)[i] for i in order])  # noqa: E731
    mixed = correct(correction, cut(mu), cut(pi), offsets_of(offsets.diff()[order]), cut(mask), cut(advantages))
    assert torch.equal(mixed.weights_N, cut(whole.weights_N))
    assert torch.equal(mixed.keep_N, cut(whole.keep_N))
    parts = [
        correct(correction, m, p, offsets_of([len(m)]), k, a)
        for m, p, k, a in zip(*(rows(values, offsets) for values in (mu, pi, mask, advantages)), strict=True)
    ]
    assert torch.equal(torch.cat([part.weights_N for part in parts]), whole.weights_N)
    assert fractions(add_counts(part.counts for part in parts)) == pytest.approx(whole.stats)


def test_low_precision_log_probs_are_widened_before_they_are_subtracted():
    mu, pi = torch.tensor([-3.0]).bfloat16(), torch.tensor([-3.015625]).bfloat16()
    found = correct(preset("is"), mu, pi, offsets_of([1]), torch.tensor([True]))
    assert float(found.weights_N[0]) == pytest.approx(math.exp(-0.015625))


def test_a_preset_is_named_started_from_or_spelled_out():
    assert preset("tis") == Correction()
    assert preset({"preset": "tis", "high": 5}) == Correction(high=5.0)
    assert preset({"level": "token", "bound": "mask", "low": 0.5, "high": 5}) == PRESETS["icepop"]
    spelled = preset({"level": "none", "filters": [{"criterion": "k3", "aggregate": "mean", "high": 0.01}]})
    assert spelled == Correction(level="none", filters=(Filter("k3", "mean", high=0.01),))
    assert preset(spelled) is spelled


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_written_out_as_a_mapping_and_read_again_is_itself(name):
    assert preset(dataclasses.asdict(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    "given, message",
    [
        ("tsi", r"unknown correction 'tsi', did you mean 'tis'\?; presets: none, is"),
        ("sequence_mis", "did you mean 'sequence-mis'"),
        ("ice-pop", "did you mean 'icepop'"),
        ({"preset": "tis", "hihg": 5}, r"correction has no field 'hihg', did you mean 'high'\?"),
        ({"filters": [{"criterium": "k3"}]}, r"filter has no field 'criterium', did you mean 'criterion'\?"),
        ({"filters": "k3"}, "expected a list"),
        ({"level": "tokens"}, r"level='tokens' is unknown, did you mean 'token'\?"),
        ({"bound": "clip"}, "valid: truncate, mask, none"),
        ({"high": 0.2}, "do not contain 1"),
        ({"low": 3, "high": 2}, "do not contain 1"),
        ({"high": "much"}, "high='much' is not a number"),
        ({"filters": [{"low": 3, "high": 2}]}, "low=3.0 is above high=2.0"),
        ({"anchor": "sampler"}, "level=token applies it twice"),
        (3, "preset's name or a mapping"),
    ],
)
def test_what_is_no_correction_is_refused_with_the_nearest_that_is(given, message):
    with pytest.raises(ValueError, match=message):
        preset(given)


def test_a_correction_reads_well():
    assert str(preset("tis")) == "rho per token, truncated into [0, 2]"
    assert str(preset("none")) == "weights 1"
    assert str(preset("is")) == "rho per token, unbounded"
    assert str(preset("ppo-is")) == "sampler log-probs as pi_old inside the clip"
    assert str(preset("sequence-mis")) == "product of rho per response, dropped outside [0, 2]"
    item = Filter("k1", "mean", high=0.05, advantage="negative")
    assert str(Correction(level="none", filters=(item,), dropped_in_denominator=True)) == (
        "weights 1; drop responses with mean k1 outside [-inf, 0.05] where the advantage is negative; "
        "dropped tokens stay in the denominator"
    )
