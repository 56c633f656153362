"""int8: hand-computed codes and scales, what is covered, and what an update leaves visible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trueup.learner.model import load_causal_lm
from trueup.quantize import INT8_CONFIG, StepMeter, dequantise, int8_tensors, linear_weights, quantise, simulated_int8


@pytest.fixture
def mini():
    return load_causal_lm("mini", "bf16", "eager")


def test_codes_and_scales_by_hand():
    # Channel 0: scale 2.54 / 127 = 0.02. Channel 1: scale 127 / 127 = 1, ties go to the even code.
    codes, scale = quantise(torch.tensor([[2.54, -1.0, 0.011, 0.0], [-127.0, 0.5, 1.5, 63.4]]))
    assert codes.tolist() == [[127, -50, 1, 0], [-127, 0, 2, 63]]
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (2, 1)
    assert scale[:, 0].tolist() == pytest.approx([0.02, 1.0])
    assert dequantise(codes, scale)[1].tolist() == [-127, 0, 2, 63]


def test_the_scale_is_of_the_bf16_rounded_weight_in_float32():
    weight = torch.tensor([[1.003, 0.1]]).to(torch.bfloat16)
    _, scale = quantise(weight)
    assert scale.item() == pytest.approx(1.0 / 127, rel=1e-6)  # bf16 rounds 1.003 to 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=6, max_size=6), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_the_error_is_at_most_half_a_step_and_the_codes_are_symmetric(values, dtype):
    weight = torch.tensor(values).view(2, 3).to(dtype)
    codes, scale = quantise(weight)
    error = (dequantise(codes, scale).double() - weight.double()).abs()
    assert (error <= scale.double() * 0.5 * (1 + 1e-4)).all()
    assert codes.min() >= -127
    assert torch.equal(quantise(-weight)[0], -codes) and torch.equal(quantise(-weight)[1], scale)


def test_the_largest_weight_of_each_channel_is_kept():
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    codes, scale = quantise(weight)
    assert codes.abs().amax(dim=1).tolist() == [127] * 64
    torch.testing.assert_close(dequantise(codes, scale).abs().amax(dim=1), weight.abs().amax(dim=1))


def test_channels_do_not_share_a_scale():
    weight = torch.tensor([[1e-3, -5e-4], [1e3, -5e2]])
    torch.testing.assert_close(dequantise(*quantise(weight)), weight, rtol=1e-2, atol=0)


def test_a_channel_of_zeros_stays_zero():
    codes, scale = quantise(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    assert codes.tolist() == [[0, 0], [127, 0]]
    assert scale.isfinite().all() and (scale > 0).all()
    assert dequantise(codes, scale)[0].tolist() == [0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="NaN or infinity; int8 cannot carry it. Look at policy/grad_norm"):
        quantise(torch.tensor([[1.0, value]]))


# --- what is covered --------------------------------------------------------------------------------------------------


def test_every_linear_layer_but_the_head_is_covered(mini):
    covered, parameters = linear_weights(mini), dict(mini.named_parameters())
    assert covered <= set(parameters)
    left = set(parameters) - covered
    assert all(any(part in name for part in ("norm", "embed", "lm_head", "bias")) for name in left), left
    assert not any(any(part in name for part in ("norm", "embed", "lm_head", "bias")) for name in covered)
    layers = mini.config.num_hidden_layers
    assert len(covered) == 7 * layers  # q, k, v, o, gate, up, down
    assert INT8_CONFIG["ignore"] == ["lm_head"]


def test_an_untied_head_is_not_covered():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)

        def get_output_embeddings(self):
            return self.head

    assert linear_weights(Model()) == {"body.weight"}


def test_covered_weights_become_codes_and_scales_and_others_pass_through():
    norm, weight = torch.ones(2), torch.tensor([[1.0, -0.5], [0.25, 0.0]])
    found = list(int8_tensors([("norm.weight", norm), ("up.weight", weight)], {"up.weight"}))
    assert [name for name, _ in found] == ["norm.weight", "up.weight", "up.weight_scale"]
    assert found[0][1] is norm
    codes, scale = quantise(weight)
    assert torch.equal(found[1][1], codes) and torch.equal(found[2][1], scale)


def test_the_int8_checkpoint_of_a_model_dequantises_to_its_weights(mini):
    covered = linear_weights(mini)
    found = dict(int8_tensors(mini.state_dict().items(), covered))
    assert len(found) == len(mini.state_dict()) + len(covered)
    for name, weight in mini.state_dict().items():
        if name in covered:
            assert found[name].dtype == torch.int8
            scale = found[f"{name}_scale"]
            assert ((dequantise(found[name], scale) - weight.float()).abs() <= 0.5001 * scale).all()
        else:
            assert torch.equal(found[name], weight)


# --- the simulation ---------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers and a head; the second layer may share the first one's weight."""

    def __init__(self, shared: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(4, 4, bias=False) for _ in range(3))
        if shared:
            self.second.weight = self.first.weight

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def state(model: nn.Module) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_simulation_computes_with_int8_weights_and_activations():
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data = torch.tensor([[127.0, 1.4, -0.6]])  # codes 127, 1, -1 at scale 1
    body = nn.Sequential(layer)
    body.get_output_embeddings = lambda: None
    x = torch.tensor([[12.7, 0.26, 0.0]])  # codes 127, 3, 0 at scale 0.1
    with simulated_int8(body) as simulated, torch.no_grad():
        assert layer.weight.tolist() == [[127, 1, -1]]
        assert simulated(x).item() == pytest.approx(12.7 * 127 + 0.3)


def test_each_token_has_an_activation_scale_of_its_own():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.eye(2)
    body = nn.Sequential(layer)
    body.get_output_embeddings = lambda: None
    x = torch.tensor([[1000.0, 0.0], [1.0, 0.5], [0.0, 0.0]])
    with simulated_int8(body), torch.no_grad():
        torch.testing.assert_close(body(x), torch.tensor([[1000.0, 0.0], [1.0, 64 / 127], [0.0, 0.0]]))


def test_the_simulation_leaves_the_head_alone_and_gives_the_model_back(mini):
    before, ids = state(mini), torch.arange(5, 25)[None]
    with torch.no_grad():
        exact = mini(input_ids=ids).logits
        with simulated_int8(mini) as simulated:
            assert simulated is mini
            assert torch.equal(mini.get_output_embeddings().weight, before["lm_head.weight"])
            rounded = mini(input_ids=ids).logits
        again = mini(input_ids=ids).logits
    assert not torch.equal(rounded, exact) and torch.equal(again, exact)
    assert_untouched(mini, before)


def test_the_model_is_given_back_also_when_the_block_fails(mini):
    before = state(mini)
    with pytest.raises(RuntimeError, match="in the block"), simulated_int8(mini):
        raise RuntimeError("in the block")
    assert_untouched(mini, before)


def test_the_model_is_given_back_also_when_a_weight_cannot_be_quantised():
    model = Two()
    model.second.weight.data[0, 0] = float("inf")
    before = state(model)
    with pytest.raises(ValueError, match="NaN or infinity"), simulated_int8(model):
        pass
    assert_untouched(model, before)


def test_layers_that_share_a_weight_get_it_back():
    model = Two(shared=True)
    before = state(model)
    with simulated_int8(model):
        assert not torch.equal(model.first.weight, before["first.weight"])
    assert_untouched(model, before)


# --- the meter --------------------------------------------------------------------------------------------------------


def test_the_meter_counts_weights_that_moved_by_less_than_a_step():
    meter = StepMeter(stride=1)
    weight = torch.tensor([[127.0, 0.0, 0.0, 0.0], [1.27, 0.0, 0.0, 0.0]])  # steps 1 and 0.01
    assert meter.measure([("up.weight", weight)], {"up.weight"}) is None
    moved = weight + torch.tensor([[0.0, 0.5, -0.9, 1.5], [0.0, 0.005, 0.02, -0.5]])
    # Below: 0, 0.5 and 0.9 of a step of 1; 0 and 0.005 of 0.01. Above: 1.5; 0.02 and 0.5.
    assert meter.measure([("up.weight", moved)], {"up.weight"}) == 5 / 8
    assert meter.measure([("up.weight", moved.clone())], {"up.weight"}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_meter_remembers_weights_that_are_updated_in_place(dtype):
    meter, weight = StepMeter(stride=1), torch.tensor([[127.0, 0.0, 0.0, 0.0]], dtype=dtype)
    meter.measure([("up.weight", weight)], {"up.weight"})
    weight[0, 2:] += 8
    assert meter.measure([("up.weight", weight)], {"up.weight"}) == 0.5


def test_the_meter_looks_at_every_stride_th_weight_of_covered_layers_only():
    meter = StepMeter(stride=2)

    def weights(value):
        return [("norm.weight", torch.ones(3) * value), ("up.weight", torch.tensor([[127.0, value, 0.0, value]]))]

    assert meter.measure(weights(0.0), {"up.weight"}) is None
    assert meter.measure(weights(50.0), {"up.weight"}) == 1  # places 0 and 2 stood still


def test_the_meter_counts_a_channel_of_zeros_that_stays_zero_as_below():
    meter = StepMeter(stride=1)
    for expected in (None, 1.0):
        assert meter.measure([("up.weight", torch.zeros(2, 2))], {"up.weight"}) == expected
