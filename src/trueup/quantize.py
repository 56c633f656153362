"""Live weights -> the tensors of a quantised checkpoint, and the same arithmetic simulated on the learner.

A precision is a `Scheme`; the layout is that of compressed-tensors, so that any engine that reads such checkpoints can be
reloaded with these. All is symmetric: w ~ scale * code, scale = largest |w| of what shares it / largest code. `Quantiser`
holds what lasts from one delivery to the next: scales that stay those of step 0, and calibrated ranges of activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

_SMALLEST_SCALE = 1e-12  # an all-zero channel stays zero instead of dividing by zero


@dataclass(frozen=True)
class Scheme:
    """How a precision rounds linear layers."""

    bits: Literal[4, 8]
    """Of a weight. 8: an int8 product; 4: packed eight to an int32, multiplied in bf16."""
    shared: Literal["tensor", "channel"] | int
    """What shares a weight scale: the whole weight, an output channel, or so many inputs of a channel."""
    activations: Literal["token", "static"] | None
    """int8 activations with one scale a token, computed as they come; with one calibrated scale a layer; or bf16."""

    @property
    def largest(self) -> int:
        """Codes lie in [-largest, largest]."""
        return 2 ** (self.bits - 1) - 1

    @property
    def config(self) -> dict:
        """The `quantization_config` of an engine that is fed by `Quantiser.tensors`."""
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": self.shared}
        if isinstance(self.shared, int):
            weights |= {"strategy": "group", "group_size": self.shared}
        group = {"targets": ["Linear"], "weights": weights}
        if self.activations:
            dynamic = self.activations == "token"
            strategy = "token" if dynamic else "tensor"
            group["input_activations"] = {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": strategy,
                "dynamic": dynamic,
            }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.bits == 8 else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


SCHEMES = {
    "int8": Scheme(8, "channel", "token"),
    "int8-tensor": Scheme(8, "tensor", "token"),
    "int8-static": Scheme(8, "channel", "static"),
    "int4": Scheme(4, 32, None),
    "int4-channel": Scheme(4, "channel", None),
}
"""Precision -> scheme. Those with static activations need `Quantiser.calibrate` before the first delivery."""


class Quantiser:
    """Rounds one model's weights, delivery after delivery. Weights are those the learner scores with, bf16-rounded."""

    def __init__(self, scheme: Scheme, covered: set[str], activation_range: float = 1.0):
        """covered: names of the weights to quantise. activation_range: what static activation scales span, as a multiple of
        the largest input seen in calibration: below 1 cuts the largest, above 1 coarsens the rest."""
        self.scheme = scheme
        self.covered = covered
        self.activation_range = activation_range
        self.start()

    def start(self, frozen: bool = False) -> None:
        """Forget all scales. frozen: those that come next stay, and values beyond them are cut."""
        self.frozen = frozen
        self._weight_scales: dict[str, Tensor] = {}
        self._input_scales: dict[str, Tensor] = {}

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` is due before the next delivery."""
        return self.scheme.activations == "static" and not (self.frozen and self._input_scales)

    def scale(self, name: str, weight: Tensor) -> Tensor:
        """The scale of a weight [out, in], float32: [1, 1], [out, 1] or [out, groups]."""
        if name in self._weight_scales:
            return self._weight_scales[name].to(weight.device)
        if not weight.isfinite().all():
            raise ValueError(
                "a weight holds NaN or infinity; int8 and int4 cannot carry it. Look at policy/grad_norm before this step"
            )
        largest = _grouped(weight.float().abs(), self.scheme.shared).amax(dim=-1)
        scale = (largest / self.scheme.largest).clamp_min(_SMALLEST_SCALE)
        if self.scheme.shared == "tensor":
            scale = scale.amax().view(1, 1)
        if self.scheme.bits == 4:  # the engine holds these in bf16; round before they are divided by
            scale = scale.to(torch.bfloat16).float()
        if self.frozen:
            self._weight_scales[name] = scale.cpu()
        return scale

    def quantise(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[out, in] -> (int8 codes [out, in], float32 scale as of `scale`)."""
        scale, largest = self.scale(name, weight), self.scheme.largest
        codes = _grouped(weight.float(), self.scheme.shared) / scale[..., None]
        return codes.round_().clamp_(-largest, largest).to(torch.int8).view_as(weight), scale

    def dequantise(self, codes: Tensor, scale: Tensor) -> Tensor:
        """What the engine computes with: float32 [out, in]."""
        return (_grouped(codes.float(), self.scheme.shared) * scale[..., None]).view_as(codes)

    def tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Replace each covered weight by the checkpoint tensors of its codes and scales; pass the others through."""
        for name, weight in weights:
            if name not in self.covered:
                yield name, weight
                continue
            codes, scale = self.quantise(name, weight)
            if self.scheme.bits == 4:
                yield f"{name}_packed", pack_int4(codes)
                yield f"{name}_scale", scale.to(torch.bfloat16)
                yield f"{name}_shape", torch.tensor(weight.shape)
            else:
                yield name, codes
                yield f"{name}_scale", scale.view(1) if self.scheme.shared == "tensor" else scale
            if self.scheme.activations == "static":
                yield f"{name.removesuffix('weight')}input_scale", self._input_scale(name).view(1)

    def _input_scale(self, name: str) -> Tensor:
        if name not in self._input_scales:
            raise ValueError(
                f"no range of activations is known for {name}: static scales need calibrating before the first delivery; "
                "call Quantiser.calibrate around a forward over typical text, or choose precision int8"
            )
        return self._input_scales[name]

    @contextmanager
    def calibrate(self, model: nn.Module) -> Iterator[None]:
        """Static activation scales become those of the largest input that each layer sees within the block."""
        largest: dict[str, Tensor] = {}

        def watch(name: str):
            def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                seen = inputs[0].detach().abs().max().float().cpu()
                largest[name] = torch.maximum(largest.get(name, seen), seen)

            return see

        linears = [(f"{name}.weight", module) for name, module in model.named_modules()]
        hooks = [module.register_forward_pre_hook(watch(name)) for name, module in linears if name in self.covered]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._input_scales = {
            name: (value * self.activation_range / 127).clamp_min(_SMALLEST_SCALE) for name, value in largest.items()
        }

    @contextmanager
    def simulated(self, model: nn.Module) -> Iterator[nn.Module]:
        """Within the block, `model` computes as the engine does but for the order of sums: linear layers with dequantised
        weights, on activations rounded as the scheme says. What then still differs are kernels."""
        hooks, originals = [], []
        try:
            for name, module in model.named_modules():
                weight_name = f"{name}.weight"
                if weight_name not in self.covered:
                    continue
                simulated = self.dequantise(*self.quantise(weight_name, module.weight.data)).to(module.weight.dtype)
                originals.append((module, module.weight.data))
                module.weight.data = simulated
                if self.scheme.activations:
                    static = self._input_scale(weight_name) if self.scheme.activations == "static" else None
                    hooks.append(module.register_forward_pre_hook(_rounding(static)))
            yield model
        finally:
            for hook in hooks:
                hook.remove()
            for module, weight in reversed(originals):  # layers may share a weight: the first one saw the original
                module.weight.data = weight

    def state(self) -> dict[str, Tensor]:
        """The scales that a resumed run must go on with; nothing unless frozen."""
        if not self.frozen:
            return {}
        weights = {f"weight/{name}": scale for name, scale in self._weight_scales.items()}
        return weights | {f"input/{name}": scale for name, scale in self._input_scales.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for kind, scales in (("weight/", self._weight_scales), ("input/", self._input_scales)):
            scales.update({name.removeprefix(kind): scale for name, scale in state.items() if name.startswith(kind)})


def _grouped(weight: Tensor, shared: str | int) -> Tensor:
    """[out, in] -> [out, groups, inputs of a group]: what shares a scale in the last dimension (for a tensor, per channel)."""
    size = shared if isinstance(shared, int) else weight.shape[1]
    if weight.shape[1] % size:
        raise ValueError(
            f"a weight has {weight.shape[1]} inputs, no multiple of the {size} that share a scale; use int4-channel or int8"
        )
    return weight.reshape(weight.shape[0], -1, size)


def _rounding(static: Tensor | None):
    """A hook that rounds a layer's input to int8: with the given scale, or with one of its own for each token."""

    def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        exact = inputs[0].float()
        if static is None:
            scale = (exact.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(_SMALLEST_SCALE)
        else:
            scale = static.to(exact.device)
        # A token's own scale never reaches -128; a static one does, and the engine uses it.
        return ((exact / scale).round_().clamp_(-128, 127).mul_(scale).to(inputs[0].dtype), *inputs[1:])

    return rounded


def pack_int4(codes: Tensor) -> Tensor:
    """int8 codes [out, in] in [-8, 7] -> int32 [out, in / 8]: eight a word, offset by 8, the first in the lowest bits."""
    shifted = (codes.to(torch.int32) + 8).view(codes.shape[0], -1, 8)
    packed = torch.zeros(shifted.shape[:2], dtype=torch.int32, device=codes.device)
    for place in range(8):
        packed |= shifted[..., place] << (4 * place)
    return packed


def linear_weights(model: nn.Module) -> set[str]:
    """Names of the weights that are quantised: every linear layer but the head. Embeddings and norms are no linears."""
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def simulated_int8(model: nn.Module):
    """`Quantiser.simulated` for precision int8 with fresh scales."""
    return Quantiser(SCHEMES["int8"], linear_weights(model)).simulated(model)


class StepMeter:
    """How much of an update a quantised engine can see: the share of weights that moved by less than one step.

    Measured since the last call on an even sample of each weight (every `stride`-th value), so that no second copy of
    the model is held. Weights that did not move at all count as below: neither engine sees them.
    """

    def __init__(self, quantiser: Quantiser, stride: int = 61):
        self.quantiser = quantiser
        self.stride = stride
        self._before: dict[str, Tensor] = {}

    def measure(self, weights: Iterable[tuple[str, Tensor]]) -> float | None:
        """The share in [0, 1]; None on the first call."""
        below = total = 0
        for name, weight in weights:
            if name not in self.quantiser.covered:
                continue
            step = self.quantiser.scale(name, weight)[..., None]
            now = weight.flatten()[:: self.stride].to(torch.float32, copy=True)  # a view would follow the weights
            if name in self._before:
                moved = (now - self._before[name]).abs()
                step = step.expand_as(_grouped(weight, self.quantiser.scheme.shared)).flatten()[:: self.stride]
                below += int((moved < step).sum())
                total += len(moved)
            self._before[name] = now
        return below / total if total else None
