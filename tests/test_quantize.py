"""Quantisation: hand-computed codes and scales, what is covered, and what an update leaves visible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trueup.learner.model import load_causal_lm
from trueup.quantize import SCHEMES, Quantiser, StepMeter, linear_weights, pack_int4, simulated_int8


def quantiser(precision: str = "int8", *covered: str, activation_range: float = 1.0) -> Quantiser:
    return Quantiser(SCHEMES[precision], set(covered), activation_range)


def quantise(weight):
    return quantiser().quantise("any.weight", weight)


def dequantise(codes, scale):
    return quantiser().dequantise(codes, scale)


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
    with pytest.raises(ValueError, match="NaN or infinity; int8 and int4 cannot carry it. Look at policy/grad_norm"):
        quantise(torch.tensor([[1.0, value]]))


# --- other precisions -------------------------------------------------------------------------------------------------


def test_one_scale_a_tensor_by_hand():
    found = dict(
        quantiser("int8-tensor", "up.weight").tensors([("up.weight", torch.tensor([[127.0, 0.4], [1.6, -3.0]]))])
    )
    assert found["up.weight"].tolist() == [[127, 0], [2, -3]]
    assert found["up.weight_scale"].tolist() == [1]


def test_int4_by_hand_one_scale_32_inputs():
    weight = torch.zeros(1, 64)
    weight[0, :3] = torch.tensor([7.0, -2.6, 0.4])  # scale 1: codes 7, -3, 0
    weight[0, 32:34] = torch.tensor([-0.5, 0.25])  # scale 0.5 / 7 = 0.0714 in bf16: codes -7, 3 or 4
    int4 = quantiser("int4", "up.weight")
    codes, scale = int4.quantise("up.weight", weight)
    assert scale.tolist() == [[1.0, pytest.approx(0.5 / 7, rel=1 / 256)]]
    assert torch.equal(scale, scale.to(torch.bfloat16).float())  # as the engine holds it
    assert codes[0, :4].tolist() == [7, -3, 0, 0] and codes[0, 32].item() == -7
    assert int4.dequantise(codes, scale)[0, :2].tolist() == [7, -3]
    found = dict(int4.tensors([("up.weight", weight)]))
    assert list(found) == ["up.weight_packed", "up.weight_scale", "up.weight_shape"]
    assert found["up.weight_packed"].shape == (1, 8) and found["up.weight_shape"].tolist() == [1, 64]
    assert found["up.weight_scale"].dtype == torch.bfloat16


def test_int4_codes_lie_eight_to_a_word_the_first_lowest():
    word = pack_int4(torch.tensor([[-8, -7, 0, 7, -8, -8, -8, -8]], dtype=torch.int8))
    assert word.dtype == torch.int32 and word.tolist() == [[0x0000F810]]
    assert pack_int4(torch.tensor([[0, 0, 0, 0, 0, 0, 0, 7]])).item() & 0xFFFFFFFF == 0xF8888888


def test_int4_needs_whole_groups():
    with pytest.raises(
        ValueError, match="33 inputs, no multiple of the 32 that share a scale; use int4-channel or int8"
    ):
        quantiser("int4").quantise("up.weight", torch.ones(2, 33))
    assert quantiser("int4-channel").quantise("up.weight", torch.ones(2, 33))[1].shape == (2, 1)


@pytest.mark.parametrize("precision", SCHEMES)
def test_every_precision_keeps_within_half_a_step(precision):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    coarse = quantiser(precision)
    codes, scale = coarse.quantise("up.weight", weight)
    steps = coarse.dequantise(torch.ones_like(codes), scale)
    assert ((coarse.dequantise(codes, scale) - weight.float()).abs() <= 0.52 * steps).all()  # int4's scale is a bf16
    assert codes.abs().max() == coarse.scheme.largest


def test_frozen_scales_are_those_of_the_first_delivery_and_cut_what_is_larger():
    frozen = quantiser("int8", "up.weight")
    frozen.start(frozen=True)
    first = dict(frozen.tensors([("up.weight", torch.tensor([[127.0, 10.0], [12.7, 1.0]]))]))
    then = dict(frozen.tensors([("up.weight", torch.tensor([[254.0, 20.0], [6.0, 1.0]]))]))
    assert torch.equal(then["up.weight_scale"], first["up.weight_scale"])
    assert then["up.weight"].tolist() == [[127, 20], [60, 10]]  # 254 is beyond 127 steps of 1
    resumed = quantiser("int8", "up.weight")
    resumed.start(frozen=True)
    resumed.load_state(frozen.state())
    again = dict(resumed.tensors([("up.weight", torch.tensor([[254.0, 20.0], [6.0, 1.0]]))]))
    assert all(torch.equal(again[name], then[name]) for name in then)


def test_fresh_scales_follow_the_weights_and_are_not_kept():
    fresh = quantiser("int8", "up.weight")
    for largest in (127.0, 254.0):
        found = dict(fresh.tensors([("up.weight", torch.tensor([[largest, 0.0]]))]))
        assert found["up.weight_scale"].item() == largest / 127 and found["up.weight"].tolist() == [[127, 0]]
    assert fresh.state() == {}


def one_layer(weight):
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.weight.data = torch.tensor(weight)
    return nn.Sequential(layer)


def test_static_activation_scales_are_of_the_largest_input_seen():
    body, static = one_layer([[1.0, 0.0]]), quantiser("int8-static", "0.weight", activation_range=2.0)
    assert static.needs_calibration
    with static.calibrate(body), torch.no_grad():
        body(torch.tensor([[1.0, -63.5]]))
        body(torch.tensor([[3.0, 2.0]]))
    found = dict(static.tensors([("0.weight", body[0].weight.data)]))
    assert found["0.input_scale"].tolist() == [1.0]  # twice 63.5, over 127
    assert not body[0]._forward_pre_hooks
    with static.simulated(body), torch.no_grad():  # rounded to steps of 1, cut at -128 and 127
        found = body(torch.tensor([[2.6, 0.0], [500.0, 0.0], [-500.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[3.0], [127.0], [-128.0]]))


def test_static_scales_that_are_frozen_are_calibrated_once():
    body, static = one_layer([[1.0]]), quantiser("int8-static", "0.weight")
    static.start(frozen=True)
    with static.calibrate(body), torch.no_grad():
        body(torch.tensor([[127.0]]))
    assert not static.needs_calibration
    resumed = quantiser("int8-static", "0.weight")
    resumed.start(frozen=True)
    assert resumed.needs_calibration
    dict(static.tensors([("0.weight", body[0].weight.data)]))
    resumed.load_state(static.state())
    assert not resumed.needs_calibration


def test_static_scales_without_calibration_are_refused():
    with pytest.raises(ValueError, match="no range of activations is known for up.weight.*Quantiser.calibrate"):
        dict(quantiser("int8-static", "up.weight").tensors([("up.weight", torch.ones(2, 2))]))


def test_the_simulation_of_int4_rounds_weights_only(mini):
    int4 = quantiser("int4", *linear_weights(mini))
    name = "model.layers.0.mlp.up_proj.weight"
    weight = mini.get_parameter(name).data.clone()
    with int4.simulated(mini):
        assert torch.equal(
            mini.get_parameter(name).data, int4.dequantise(*int4.quantise(name, weight)).to(weight.dtype)
        )
        assert not any(module._forward_pre_hooks for module in mini.modules())
    assert torch.equal(mini.get_parameter(name).data, weight)


# --- what is covered --------------------------------------------------------------------------------------------------


def test_every_linear_layer_but_the_head_is_covered(mini):
    covered, parameters = linear_weights(mini), dict(mini.named_parameters())
    assert covered <= set(parameters)
    left = set(parameters) - covered
    assert all(any(part in name for part in ("norm", "embed", "lm_head", "bias")) for name in left), left
    assert not any(any(part in name for part in ("norm", "embed", "lm_head", "bias")) for name in covered)
    layers = mini.config.num_hidden_layers
    assert len(covered) == 7 * layers  # q, k, v, o, gate, up, down
    assert all(scheme.config["ignore"] == ["lm_head"] for scheme in SCHEMES.values())


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
    found = list(quantiser("int8", "up.weight").tensors([("norm.weight", norm), ("up.weight", weight)]))
    assert [name for name, _ in found] == ["norm.weight", "up.weight", "up.weight_scale"]
    assert found[0][1] is norm
    codes, scale = quantise(weight)
    assert torch.equal(found[1][1], codes) and torch.equal(found[2][1], scale)


def test_the_int8_checkpoint_of_a_model_dequantises_to_its_weights(mini):
    covered = linear_weights(mini)
    found = dict(quantiser("int8", *covered).tensors(mini.state_dict().items()))
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
    meter = StepMeter(quantiser("int8", "up.weight"), stride=1)
    weight = torch.tensor([[127.0, 0.0, 0.0, 0.0], [1.27, 0.0, 0.0, 0.0]])  # steps 1 and 0.01
    assert meter.measure([("up.weight", weight)]) is None
    moved = weight + torch.tensor([[0.0, 0.5, -0.9, 1.5], [0.0, 0.005, 0.02, -0.5]])
    # Below: 0, 0.5 and 0.9 of a step of 1; 0 and 0.005 of 0.01. Above: 1.5; 0.02 and 0.5.
    assert meter.measure([("up.weight", moved)]) == 5 / 8
    assert meter.measure([("up.weight", moved.clone())]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_meter_remembers_weights_that_are_updated_in_place(dtype):
    meter, weight = (
        StepMeter(quantiser("int8", "up.weight"), stride=1),
        torch.tensor([[127.0, 0.0, 0.0, 0.0]], dtype=dtype),
    )
    meter.measure([("up.weight", weight)])
    weight[0, 2:] += 8
    assert meter.measure([("up.weight", weight)]) == 0.5


def test_the_meter_looks_at_every_stride_th_weight_of_covered_layers_only():
    meter = StepMeter(quantiser("int8", "up.weight"), stride=2)

    def weights(value):
        return [("norm.weight", torch.ones(3) * value), ("up.weight", torch.tensor([[127.0, value, 0.0, value]]))]

    assert meter.measure(weights(0.0)) is None
    assert meter.measure(weights(50.0)) == 1  # places 0 and 2 stood still


def test_the_meter_counts_a_channel_of_zeros_that_stays_zero_as_below():
    meter = StepMeter(quantiser("int8", "up.weight"), stride=1)
    for expected in (None, 1.0):
        assert meter.measure([("up.weight", torch.zeros(2, 2))]) == expected


@pytest.mark.parametrize("precision, below", [("int8", 0.5), ("int8-tensor", 1.0), ("int4-channel", 1.0)])
def test_the_meter_measures_in_steps_of_the_precision(precision, below):
    meter = StepMeter(quantiser(precision, "up.weight"), stride=1)
    weight = torch.tensor([[127.0, 0.0], [1.27, 0.0]])
    meter.measure([("up.weight", weight)])
    # Half a step of the first channel, ten of the second; less with one scale a tensor; at most half a step of int4.
    moved = weight + torch.tensor([[0.5, 0.5], [0.1, 0.1]])
    assert meter.measure([("up.weight", moved)]) == below


def test_the_meter_counts_in_frozen_steps():
    frozen = quantiser("int8", "up.weight")
    frozen.start(frozen=True)
    meter = StepMeter(frozen, stride=1)
    meter.measure([("up.weight", torch.tensor([[127.0, 0.0]]))])
    assert meter.measure([("up.weight", torch.tensor([[1270.0, 5.0]]))]) == 0  # 5 of the step 1, half of a fresh 10
