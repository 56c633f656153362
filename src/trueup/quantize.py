"""Live weights -> int8 checkpoint tensors (W8A8: int8 weights, int8 activations quantised as they come).

Symmetric, one scale an output channel: w ~ scale * q, scale = max|w| / 127, q = round(w / scale). The layout is that of
compressed-tensors' `int-quantized` format, so that any engine that reads such checkpoints can be reloaded with these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}
"""The `quantization_config` of an engine that is fed by `int8_tensors`."""

_SMALLEST_SCALE = 1e-12  # an all-zero channel stays zero instead of dividing by zero


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> (int8 [out, in], float32 scale [out, 1]). Give the bf16-rounded weight that the learner scores with."""
    if not weight.isfinite().all():
        raise ValueError(
            "a weight holds NaN or infinity; int8 cannot carry it. Look at policy/grad_norm before this step"
        )
    exact = weight.float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / 127).clamp_min(_SMALLEST_SCALE)
    return (exact / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """What the engine computes with: float32 [out, in]."""
    return codes.float() * scale


def linear_weights(model: nn.Module) -> set[str]:
    """Names of the weights that int8 covers: every linear layer but the head. Embeddings and norms are no linears."""
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def int8_tensors(weights: Iterable[tuple[str, Tensor]], quantised: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Replace each weight named in `quantised` by its int8 codes and `<name>_scale`; pass the others through."""
    for name, weight in weights:
        if name in quantised:
            codes, scale = quantise(weight)
            yield name, codes
            yield f"{name}_scale", scale
        else:
            yield name, weight


@contextmanager
def simulated_int8(model: nn.Module) -> Iterator[nn.Module]:
    """Within the block, `model` computes as the int8 engine does but for the order of sums: linear layers with dequantised
    int8 weights, on activations rounded to int8 with one scale a token. What then still differs are kernels."""
    covered = linear_weights(model)
    hooks, originals = [], []
    try:
        for name, module in model.named_modules():
            if f"{name}.weight" in covered:
                simulated = dequantise(*quantise(module.weight.data)).to(module.weight.dtype)
                originals.append((module, module.weight.data))
                module.weight.data = simulated
                hooks.append(module.register_forward_pre_hook(_round_activations))
        yield model
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in reversed(originals):  # layers may share a weight: the first one saw the original
            module.weight.data = weight


def _round_activations(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    exact = inputs[0].float()
    scale = (exact.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(_SMALLEST_SCALE)
    return ((exact / scale).round_().clamp_(-127, 127).mul_(scale).to(inputs[0].dtype), *inputs[1:])


class StepMeter:
    """How much of an update int8 can see: the share of weights that moved by less than one quantisation step.

    Measured since the last call on an even sample of each weight (every `stride`-th value), so that no second copy of
    the model is held. Weights that did not move at all count as below: neither engine sees them.
    """

    def __init__(self, stride: int = 61):
        self.stride = stride
        self._before: dict[str, Tensor] = {}

    def measure(self, weights: Iterable[tuple[str, Tensor]], quantised: set[str]) -> float | None:
        """The share in [0, 1]; None on the first call."""
        below = total = 0
        for name, weight in weights:
            if name not in quantised:
                continue
            step = (weight.float().abs().amax(dim=1, keepdim=True) / 127).clamp_min(_SMALLEST_SCALE)
            now = weight.flatten()[:: self.stride].to(torch.float32, copy=True)  # a view would follow the weights
            if name in self._before:
                moved = (now - self._before[name]).abs()
                below += int((moved < step.expand_as(weight).flatten()[:: self.stride]).sum())
                total += len(moved)
            self._before[name] = now
        return below / total if total else None
