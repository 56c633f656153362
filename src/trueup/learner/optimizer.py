"""AdamW on float32 masters of a model that computes in bf16, in 10 bytes a weight, with clipping, warm-up and a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup.config import OptimizerConfig

_CHUNK = 1 << 20  # weights stepped at a time: what they need then stays in the cache


@dataclass
class _Slot:
    """One weight with its optimizer state."""

    name: str
    weight: nn.Parameter
    exp_avg: Tensor
    exp_avg_sq: Tensor
    remainder: Tensor | None
    """int16: what bf16 rounding took from the float32 master; None where the weight is float32 itself."""
    decay: bool
    grad: Tensor | None = None
    """float32 sum over micro-batches."""


class MasterAdamW:
    """The model's weights are bf16 roundings of float32 masters: at lr 1e-6 a bf16 weight alone would never move.

    A master is its bf16 weight and the 16 bits that rounding took, exactly. Adam's first moment is kept in the weight's
    own dtype (it forgets within ten steps, so bf16 does), the second in float32 (it moves by a thousandth a step, which
    bf16 would lose). Gradients leave the model as soon as they are complete and add up in float32 over micro-batches.
    A model that is float32 already is its own master and keeps everything in float32.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int):
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self._slots: list[_Slot] = []
        for name, weight in module.named_parameters():
            if not weight.requires_grad:
                continue
            exact = weight.dtype == torch.float32
            slot = _Slot(
                name,
                weight,
                exp_avg=torch.zeros_like(weight, requires_grad=False),
                exp_avg_sq=torch.zeros_like(weight, dtype=torch.float32, requires_grad=False),
                remainder=None if exact else torch.zeros_like(weight, dtype=torch.int16, requires_grad=False),
                # Norms, biases and other vectors are not decayed, as is the custom for transformers.
                decay=weight.dim() > 1,
            )
            weight.register_post_accumulate_grad_hook(lambda _, slot=slot: _take_gradient(slot))
            self._slots.append(slot)

    @torch.no_grad()
    def step(self, denominator: float) -> float | None:
        """Divide the summed gradients by `denominator`, clip, step and clear. Returns the gradient norm before clipping.

        Returns None, and leaves the weights alone, if a gradient is not finite.
        """
        norms = [torch.linalg.vector_norm(slot.grad) for slot in self._slots if slot.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) / denominator if norms else 0.0
        if math.isfinite(norm):
            self.learning_rate = self.config.lr * self._schedule()
            self.steps += 1
            scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6)) / denominator
            for slot in self._slots:
                if slot.grad is not None:
                    self._step(slot, scale)
        self.clear()
        return norm if math.isfinite(norm) else None

    def _step(self, slot: _Slot, scale: float) -> None:
        """AdamW (Loshchilov & Hutter 2019) with bias correction, on chunks of one weight."""
        config, rate = self.config, self.learning_rate
        first, second = 1 - config.beta1**self.steps, 1 - config.beta2**self.steps
        flat = [None if tensor is None else tensor.detach().view(-1) for tensor in (slot.weight, slot.remainder)]
        columns = (slot.exp_avg.view(-1), slot.exp_avg_sq.view(-1), slot.grad.view(-1))
        for start in range(0, slot.weight.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            weight, remainder = (None if tensor is None else tensor[part] for tensor in flat)
            exp_avg, exp_avg_sq, grad = (column[part] for column in columns)
            grad.mul_(scale)
            moment = exp_avg.float().lerp_(grad, 1 - config.beta1)
            exp_avg.copy_(moment)
            exp_avg_sq.mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
            master = weight if remainder is None else join(weight, remainder)
            if slot.decay:
                master.mul_(1 - rate * config.weight_decay)
            master.addcdiv_(moment, (exp_avg_sq / second).sqrt_().add_(config.eps), value=-rate / first)
            if remainder is not None:
                split(master, weight, remainder)

    def clear(self) -> None:
        """Forget the gradients, and give their memory back."""
        for slot in self._slots:
            slot.grad = slot.weight.grad = None

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 masters by name."""
        for slot in self._slots:
            weight = slot.weight.detach()
            yield slot.name, weight if slot.remainder is None else join(weight, slot.remainder)

    def _schedule(self) -> float:
        """Share of the full learning rate at the coming step."""
        warmup = self.config.warmup_steps
        if self.steps < warmup:
            return (self.steps + 1) / (warmup + 1)
        if self.config.schedule == "constant":
            return 1.0
        done = min(1.0, (self.steps - warmup) / max(1, self.total_steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * done)) if self.config.schedule == "cosine" else 1 - done

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, remainders and moments by name, for a checkpoint, not copied; `load_state` takes the same names."""
        yield "steps", torch.tensor(self.steps)
        for slot in self._slots:
            for kind in ("weight", "remainder", "exp_avg", "exp_avg_sq"):
                if (value := getattr(slot, kind)) is not None:
                    yield f"{kind}/{slot.name}", value.detach()

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        for slot in self._slots:
            for kind in ("weight", "remainder", "exp_avg", "exp_avg_sq"):
                if (value := getattr(slot, kind)) is not None:
                    value.copy_(state[f"{kind}/{slot.name}"])


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """bf16 weight and int16 remainder -> the float32 master, exactly. Bit patterns of one sign are ordered as numbers."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """float32 master -> bf16 weight, rounded to nearest, and the int16 that is left, both in place.

    A master half-way between two bf16 numbers may leave 32768, one more than int16 holds: its last bit is given up.
    """
    weight.copy_(master)
    left = master.view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)
    remainder.copy_(left.clamp_(-32768, 32767))


def _take_gradient(slot: _Slot) -> None:
    gradient = slot.weight.grad
    if slot.grad is None:
        slot.grad = gradient.float()
    else:
        slot.grad += gradient
    slot.weight.grad = None
