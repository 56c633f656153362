"""Every preset that reproduces a peer or a paper, against a batch worked out by hand: weights, denominator, shares cut.

`bench/peers` runs the peers' own code on random and adversarial batches besides.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_correction import BY_HAND, batches

from trueup.correction import PRESETS, Filter, correct, preset
from trueup.rollouts import offsets_of

# Four responses, mu = 0.1 everywhere:
#   rho               product     geometric mean   k3 = rho - 1 - log rho    mean k3
#   1.1, 0.9          0.99        0.995            .0047, .0054              .0050
#   2.5, 0.4          1           1                .584, .316                .45
#   4                 4           4                1.61                      1.61
#   0.3, 0.9, 1       0.27        0.646            .504, .0054, 0            .170
RHO = torch.tensor([1.1, 0.9, 2.5, 0.4, 4.0, 0.3, 0.9, 1.0], dtype=torch.float64)
OFFSETS = offsets_of([2, 2, 1, 3])
TOKEN_2 = [1.1, 0.9, 2, 0.4, 2, 0.3, 0.9, 1]  # min(rho, 2)
PRODUCT = [0.99, 0.99, 1, 1, 4, 0.27, 0.27, 0.27]

# name: weights, tokens in the denominator, tokens truncated, tokens dropped
PEERS = {
    # min(rho, 3); then rho where rho <= 3; the product likewise. What TRL masks stays in the denominator: always 8.
    "trl-token-truncate": ([1.1, 0.9, 2.5, 0.4, 3, 0.3, 0.9, 1], 8, 1, 0),
    "trl-token-mask": ([1.1, 0.9, 2.5, 0.4, 0, 0.3, 0.9, 1], 8, 0, 1),
    "trl-sequence-truncate": ([0.99, 0.99, 1, 1, 3, 0.27, 0.27, 0.27], 8, 1, 0),
    "trl-sequence-mask": ([0.99, 0.99, 1, 1, 0, 0.27, 0.27, 0.27], 8, 0, 1),
    "trl-default": ([0.99, 0.99, 1, 1, 0, 0.27, 0.27, 0.27], 8, 0, 1),
    "verl-disabled": ([1] * 8, 8, 0, 0),
    "verl-decoupled-token-is": (TOKEN_2, 8, 2, 0),
    "verl-decoupled-seq-is": ([0.99, 0.99, 1, 1, 2, 0.27, 0.27, 0.27], 8, 1, 0),
    # 0.4 and 0.3 lie below 0.5; verl sets their weight to 0 and leaves the mask alone
    "verl-decoupled-token-icepop": ([1.1, 0.9, 2.5, 0, 4, 0, 0.9, 1], 8, 0, 2),
    # products 4 and 0.27 lie outside [0.5, 2] and leave the denominator
    "verl-decoupled-seq-is-rs": ([0.99, 0.99, 1, 1, 0, 0, 0, 0], 4, 0, 4),
    # 1/G within [0.999, 1.001]: the second response alone, since 1/0.995 = 1.005
    "verl-decoupled-geo-rs": ([0, 0, 1, 1, 0, 0, 0, 0], 2, 0, 6),
    "verl-decoupled-geo-rs-seq-tis": ([0, 0, 1, 1, 0, 0, 0, 0], 2, 0, 6),  # its product is 1
    "verl-decoupled-geo-rs-token-tis": ([0, 0, 2, 0.4, 0, 0, 0, 0], 2, 1, 6),
    # mean k3 up to 0.01: the first response alone
    "verl-decoupled-k3-rs": ([1, 1, 0, 0, 0, 0, 0, 0], 2, 0, 6),
    "verl-decoupled-k3-rs-seq-tis": ([0.99, 0.99, 0, 0, 0, 0, 0, 0], 2, 0, 6),
    "verl-decoupled-k3-rs-token-tis": ([1.1, 0.9, 0, 0, 0, 0, 0, 0], 2, 0, 6),
    "geometric-tis": ([1.1, 0.9, 2, 0.4, 0, 0, 0, 0], 4, 1, 4),  # G within [0.98, 1.02]: the first two
    "k3-tis": ([1.1, 0.9, 0, 0, 0, 0, 0, 0], 2, 0, 6),
    "verl-bypass-ppo-clip": ([1] * 8, 8, 0, 0),
    "verl-bypass-ppo-clip-geo-rs": ([0, 0, 1, 1, 0, 0, 0, 0], 2, 0, 6),
    "verl-bypass-ppo-clip-k3-rs": ([1, 1, 0, 0, 0, 0, 0, 0], 2, 0, 6),
    "verl-bypass-pg-is": ([0.99, 0.99, 1, 1, 2, 0.27, 0.27, 0.27], 8, 1, 0),
    "verl-bypass-pg-token-icepop": ([1.1, 0.9, 2.5, 0, 4, 0, 0.9, 1], 8, 0, 2),
    "verl-bypass-pg-geo-rs": ([0, 0, 1, 1, 0, 0, 0, 0], 2, 0, 6),
    "verl-bypass-pg-geo-rs-seq-tis": ([0, 0, 1, 1, 0, 0, 0, 0], 2, 0, 6),
    "verl-bypass-pg-geo-rs-token-tis": ([0, 0, 2, 0.4, 0, 0, 0, 0], 2, 1, 6),
}
DIRECTED = ("dppo-tv", "prime-rl-mask", "deepseek-v3.2")  # these look at the advantage: tests of their own below


def test_every_preset_is_worked_out_by_hand_somewhere():
    assert {*BY_HAND, *PEERS, *DIRECTED} == {*PRESETS}


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_preset_gives_the_weights_denominator_and_shares_worked_out_by_hand(name):
    weights, denominator, truncated, dropped = PEERS[name]
    mu = torch.full((8,), math.log(0.1), dtype=torch.float64)
    found = correct(name, mu, mu + RHO.log(), OFFSETS)
    assert found.weights_N.tolist() == pytest.approx(weights, abs=1e-6)
    assert found.keep_N.tolist() == [weight > 0 for weight in weights]
    assert int(found.denominator_N.sum()) == denominator
    assert found.stats == pytest.approx(
        {
            "correction/truncated_fraction": truncated / 8,
            "correction/masked_fraction": dropped / 8,
            "correction/weight_mean": sum(weights) / 8,
        }
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if "geo-rs" in name])
def test_verls_geometric_bounds_are_those_of_one_over_g(name):
    # four responses of one token: 1/G = 0.998, 0.9991, 1.0009, 1.0015 against [0.999, 1.001]
    log_rho = -torch.tensor([0.998, 0.9991, 1.0009, 1.0015], dtype=torch.float64).log()
    mu = torch.full((4,), -3.0, dtype=torch.float64)
    assert correct(name, mu, mu + log_rho, offsets_of([1] * 4)).keep_N.tolist() == [False, True, True, False]


#           pi - mu   advantage
#   0.22    +         moves on where it is pushed: dropped
#   0.22    -         pulls back: kept, rho = .72 / .5
#   -0.22   +         pulls back: kept, rho = .28 / .5
#   -0.22   -         moves on: dropped
#   0.17    +         beyond 0.15 (DPPO), within 0.2 (prime-rl): rho = .67 / .5
#   -0.22   0         no push, nothing to drop
@pytest.mark.parametrize(
    "name, weights",
    [("dppo-tv", [0, 1.44, 0.56, 0, 0, 0.56]), ("prime-rl-mask", [0, 1.44, 0.56, 0, 1.34, 0.56])],
)
def test_the_total_variation_masks_drop_in_the_direction_of_the_advantage_only(name, weights):
    mu, pi = torch.full((6,), 0.5).double(), torch.tensor([0.72, 0.72, 0.28, 0.28, 0.67, 0.28]).double()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    found = correct(name, mu.log(), pi.log(), offsets_of([6]), advantages_N=advantages)
    assert found.weights_N.tolist() == pytest.approx(weights)
    assert int(found.denominator_N.sum()) == 6  # dropped tokens stay
    assert found.stats["correction/masked_fraction"] == pytest.approx(weights.count(0) / 6)


def test_dppo_caps_the_ratio_at_ten_thousand_and_prime_rl_does_not():
    mu, pi = torch.tensor([-12.0]), torch.tensor([-2.0])  # rho = e^10 = 22026, pi - mu = 0.135
    assert float(correct("dppo-tv", mu, pi, offsets_of([1]), None, mu).weights_N) == pytest.approx(1e4)
    assert float(correct("prime-rl-mask", mu, pi, offsets_of([1]), None, mu).weights_N) == pytest.approx(math.exp(10))


def test_deepseek_drops_failures_that_drifted_and_keeps_the_rest_at_weight_one():
    # log rho of four responses of two tokens; mean k1 = 0.6, 0.6, 0.45, -1. Only the first is above 0.5 and a failure.
    log_rho = torch.tensor([-1.0, -0.2, -1.0, -0.2, -0.9, 0.0, 1.0, 1.0])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    mu = torch.full((8,), -3.0)
    found = correct("deepseek-v3.2", mu, mu + log_rho, offsets_of([2] * 4), None, advantages)
    assert found.weights_N.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert int(found.denominator_N.sum()) == 8
    assert (found.counts["responses"], found.counts["responses_dropped"]) == (4, 1)


def test_a_missing_log_prob_is_dropped_here_where_trl_keeps_it_with_ratio_one():
    mu = torch.tensor([math.nan, -1.0])
    pi = torch.tensor([-1.0, -1.0 + math.log(1.5)])
    found = correct("trl-token-truncate", mu, pi, offsets_of([2]))
    assert found.weights_N.tolist() == pytest.approx([0, 1.5])  # TRL: 1, 1.5
    assert found.denominator_N.tolist() == [False, True]  # TRL: both


def test_the_older_spelling_of_a_filter_on_negative_advantages_is_read():
    spelled = {"level": "none", "filters": [{"criterion": "k1", "high": 1, "negative_advantage_only": True}]}
    assert preset(spelled).filters == (Filter("k1", high=1.0, advantage="negative"),)
    spelled["filters"][0]["negative_advantage_only"] = False
    assert preset(spelled).filters == (Filter("k1", high=1.0),)


LEAVES = {name for name in PRESETS if not PRESETS[name].dropped_in_denominator}


def test_which_presets_keep_dropped_tokens_in_the_denominator():
    stays = {name for name in PRESETS if name.startswith("trl-") or name.endswith("-icepop")} | {*DIRECTED}
    assert {*PRESETS} - LEAVES == stays


@given(st.sampled_from(sorted(PRESETS)), batches(apart=1e4))
@settings(max_examples=200, deadline=None)
def test_every_preset_on_any_log_probs_is_finite_bounded_and_drops_as_documented(name, batch):
    mu, pi, _, mask, _ = batch
    found = correct(name, *(batch[:2]), *batch[2:])
    valid = mask & torch.isfinite(mu) & torch.isfinite(pi)
    assert torch.equal(found.valid_N, valid)
    assert not (found.keep_N & ~valid).any()  # missing and masked-out tokens are never in the loss
    assert torch.equal(found.denominator_N, found.keep_N if name in LEAVES else valid)
    assert torch.isfinite(found.weights_N).all()
    assert (found.weights_N >= 0).all() and (found.weights_N <= math.exp(20) * (1 + 1e-6)).all()
    assert torch.equal(found.weights_N[~found.keep_N], torch.zeros(int((~found.keep_N).sum())))
    item = preset(name)
    if item.bound != "none":
        weights = found.weights_N[found.keep_N].double()
        assert ((weights >= item.low * (1 - 1e-6)) & (weights <= item.high * (1 + 1e-6))).all()


@given(st.sampled_from(sorted(PRESETS)), batches())
@settings(max_examples=100, deadline=None)
def test_weights_never_carry_gradient(name, batch):
    mu, pi, offsets, mask, advantages = batch
    found = correct(name, mu.requires_grad_(), pi.requires_grad_(), offsets, mask, advantages.requires_grad_())
    assert not found.weights_N.requires_grad
