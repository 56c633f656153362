"""Delivery is proved: break it in every way it breaks in practice, and each must be caught."""

import copy

import pytest
import torch

from trueup.rollouts import Rollouts
from trueup.samplers import Sampling
from trueup.sync import Canary, Delivery, DeliveryError, own_answers, worsened

SPECS = [
    "transformers:fp32",
    pytest.param("vllm:bf16", marks=pytest.mark.engine),
    pytest.param("vllm:int8", marks=pytest.mark.engine),
]
VLLM = SPECS[1:]


def train_a_little(policy, seed: int, size: float = 1e-3):
    """A few steps of learning to answer with some digits: Adam moves each weight by about `size` in all."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = Rollouts.from_lists(
        torch.randint(10, 40, (16, 12), generator=generator).tolist(),
        torch.randint(10, 30, (16, 24), generator=generator).tolist(),
    )
    optimizer = torch.optim.Adam(policy.model.parameters(), lr=size / 3)
    for _ in range(3):
        (-policy(rollouts)[0].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Faulty:
    """A sampler whose `load` can be broken; everything else is the real engine's."""

    def __init__(self, sampler):
        self._sampler = sampler
        self.change = lambda weights: weights

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def load(self, weights, version):
        self._sampler.load(self.change([(name, weight.clone()) for name, weight in weights]), version)


def canary(pi: float, error: float) -> Canary:
    """16 sequences of 8 tokens of probability `pi`, on which the sampler is `error` off, more or less."""
    off = error * (1 + 0.2 * torch.linspace(-1, 1, 128))
    logpi, mu = torch.full((128,), pi).log(), (pi - off).log()
    return Canary(mu, logpi, logpi, torch.arange(0, 129, 8), torch.full((16,), pi * (1 - pi)))


def test_rounding_of_a_policy_grown_certain_is_no_missing_part():
    # at step 0 p (1 - p) is .25, later .001: the same rounding of 1e-4 is 200 times as large relative to that
    assert worsened(canary(0.5, 1e-4), canary(0.999, 1e-4)) is None
    assert worsened(canary(0.5, 1e-4), canary(0.999, 9e-4)) > 2  # of a size that matters, it is
    assert worsened(canary(0.5, 1e-3), canary(0.5, 4e-3)) == pytest.approx(4.5e-3 / 1.5e-3, rel=0.01)
    assert worsened(canary(0.5, 1e-3), canary(0.5, 1.5e-3)) is None


@pytest.fixture(params=SPECS)
def sampler(request, engines):
    return Faulty(engines(request.param))


def deliver_to(policy, sampler, prompts):
    return Delivery(policy, sampler, prompts, context=400, stop_token_ids=(1,))


def test_sound_deliveries_pass_and_arrive_whole(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    for version in range(1, 9):
        train_a_little(policy, seed=version)
        delivery.deliver(version)
    assert sampler.version == 8


def test_a_large_update_is_seen_to_arrive_whole(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    train_a_little(policy, seed=1, size=3e-3)
    assert delivery.deliver(1)["delivery/arrived"] == pytest.approx(1, abs=0.15)


def test_an_update_below_the_noise_is_no_alarm(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    for version in range(1, 5):
        train_a_little(policy, seed=version, size=3e-6)
        assert "delivery/arrived" not in delivery.deliver(version)  # nothing can be told, so nothing is


def test_a_delivery_without_any_change_is_no_alarm(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    delivery.deliver(1)


def test_a_withheld_layer_is_caught(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    original = copy.deepcopy(policy.model.state_dict())

    def withhold(weights):  # layer 1 keeps what it was first given
        return [(name, original[name] if ".layers.1." in name else weight) for name, weight in weights]

    sampler.change = withhold
    with pytest.raises(DeliveryError, match="did not land"):
        for version in range(1, 9):
            train_a_little(policy, seed=version, size=2e-3)
            delivery.deliver(version)


def test_weights_that_never_leave_are_caught_at_once(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    first = [(name, weight.clone()) for name, weight in policy.weights()]
    sampler.change = lambda weights: first
    train_a_little(policy, seed=1, size=3e-4)
    with pytest.raises(DeliveryError, match="version 1 did not land.*still holds older weights"):
        delivery.deliver(1)


def test_weights_that_are_always_one_step_behind_are_caught(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    queue = [[(name, weight.clone()) for name, weight in policy.weights()]]

    def previous(weights):
        queue.append(weights)
        return queue[-2]

    sampler.change = previous
    with pytest.raises(DeliveryError, match="did not land"):
        for version in range(1, 4):
            train_a_little(policy, seed=version)
            delivery.deliver(version)


@pytest.mark.parametrize("spec", VLLM)
def test_a_prefix_cache_that_is_not_reset_is_caught(policy, engines, prompts, spec, monkeypatch):
    sampler = engines(spec)
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    monkeypatch.setattr(sampler, "forget_prefixes", lambda: None)
    with pytest.raises(DeliveryError, match="prefix cache"):
        for version in range(1, 4):
            train_a_little(policy, seed=version)
            delivery.deliver(version)
    monkeypatch.undo()
    sampler.forget_prefixes()


def test_an_engine_that_disagrees_from_the_start_is_refused(policy, sampler, prompts):
    shuffled = copy.deepcopy(policy.model.state_dict())
    name = next(name for name in shuffled if "mlp.down_proj" in name)
    sampler.change = lambda weights: [(n, weight.flip(0) if n == name else weight) for n, weight in weights]
    with pytest.raises(DeliveryError, match="disagree before training"):
        deliver_to(policy, sampler, prompts).deliver(0)


def test_a_version_that_the_sampler_does_not_confirm_is_refused(policy, engines, prompts):
    sampler = Faulty(engines("transformers:fp32"))
    sampler.load = lambda weights, version: Faulty.load(sampler, weights, version - 1)
    with pytest.raises(DeliveryError, match="says it holds version 4, 5 was delivered"):
        deliver_to(policy, sampler, prompts).deliver(5)


def test_a_resumed_delivery_is_held_to_the_null_of_step_0(policy, sampler, prompts):
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    first = [(name, weight.clone()) for name, weight in policy.weights()]
    train_a_little(policy, seed=1, size=2e-3)
    delivery.deliver(1)
    resumed = deliver_to(policy, sampler, prompts)
    resumed.load_state(delivery.state())
    resumed.deliver(1)
    again = deliver_to(policy, sampler, prompts)
    again.load_state(delivery.state())
    sampler.change = lambda weights: first  # after resume, the sampler is given the start checkpoint again
    with pytest.raises(DeliveryError, match="did not land"):
        again.deliver(1)


@pytest.mark.engine
def test_the_meter_tells_how_much_of_an_update_int8_can_see(policy, engines, prompts):
    delivery = deliver_to(policy, engines("vllm:int8"), prompts)
    assert "delivery/below_step_fraction" not in delivery.deliver(0)
    train_a_little(policy, seed=1, size=3e-5)
    assert delivery.deliver(1)["delivery/below_step_fraction"] > 0.9
    train_a_little(policy, seed=2, size=1e-2)
    assert delivery.deliver(2)["delivery/below_step_fraction"] < 0.6


def test_the_canary_fits_into_the_shortest_context(policy, engines, prompts):
    longest = max(map(len, prompts))
    for spare in (1, 2, 5):
        delivery = Delivery(policy, engines("transformers:fp32"), prompts, context=longest + spare, tokens=8)
        delivery.deliver(0)
        delivery.deliver(1)


# --- coarser precisions and frozen scales -----------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("spec", ["vllm:int4", "vllm:int8-static"])
@pytest.mark.parametrize("frozen", [False, True])
def test_sound_deliveries_of_coarse_weights_pass(policy, engines, prompts, spec, frozen):
    sampler = engines(spec)
    delivery = Delivery(policy, sampler, prompts, context=400, stop_token_ids=(1,), frozen_scales=frozen)
    delivery.deliver(0)
    for version in range(1, 7):
        train_a_little(policy, seed=version)
        metrics = delivery.deliver(version)
    assert sampler.version == 6
    # Weights moved by 1e-3 or less; an int8 step is about as large, an int4 step twenty times.
    assert 0.5 < metrics["delivery/below_step_fraction"] < 0.9 or spec == "vllm:int4"
    assert metrics["delivery/below_step_fraction"] > 0.9 or spec == "vllm:int8-static"


@pytest.mark.engine
@pytest.mark.parametrize("spec", ["vllm:int4", "vllm:int8-static"])
def test_coarse_weights_that_never_leave_are_caught(policy, engines, prompts, spec):
    sampler = Faulty(engines(spec))
    delivery = deliver_to(policy, sampler, prompts)
    delivery.deliver(0)
    first = [(name, weight.clone()) for name, weight in policy.weights()]
    sampler.change = lambda weights: first
    with pytest.raises(DeliveryError, match="did not land"):
        for version in range(1, 4):
            train_a_little(policy, seed=version, size=3e-3)
            delivery.deliver(version)


@pytest.mark.engine
def test_frozen_scales_survive_a_resume_and_are_what_the_engine_gets(policy, engines, prompts):
    sampler, sent = Faulty(engines("vllm:int8")), []
    name = "model.layers.0.mlp.up_proj.weight"

    def delivery():
        return Delivery(policy, sampler, prompts, context=400, stop_token_ids=(1,), frozen_scales=True)

    first = delivery()
    first.deliver(0)
    scale = sampler.quantiser.scale(name, policy.model.get_parameter(name).data).clone()
    with torch.no_grad():
        policy.model.get_parameter(name).mul_(1.02)
    first.deliver(1)
    saved = {key: value.clone() for key, value in first.state().items()}
    resumed = delivery()  # which forgets the sampler's scales, as a new process does
    resumed.load_state(saved)
    sampler.change = lambda weights: sent.extend(sampler.quantiser.tensors(weights)) or weights
    resumed.deliver(1)
    assert torch.equal(dict(sent)[f"{name}_scale"], scale)


def test_static_scales_are_calibrated_on_the_learners_own_answers(policy, prompts):
    answers = own_answers(policy, prompts[:2], Sampling(max_tokens=20, stop_token_ids=(1,), seed=0), context=400)
    assert len(answers) == 2 and answers.engine == ["transformers:bf16"] * 2
    assert policy.model.training is False
