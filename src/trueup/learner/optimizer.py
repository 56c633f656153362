"""AdamW on float32 masters of a model that computes in bf16, with clipping, warm-up and a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trueup.config import OptimizerConfig


class MasterAdamW:
    """The model's weights are bf16 roundings of float32 masters: at lr 1e-6 a bf16 weight alone would never move.

    Gradients leave the model as soon as they are complete and add up in float32 over micro-batches. A model that is
    float32 already is its own master.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int):
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self._named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self._masters: list[Tensor] = []
        for _, weight in self._named:
            if weight.dtype == torch.float32:
                self._masters.append(weight)
                continue
            master = weight.detach().float()
            self._masters.append(master)
            weight.register_post_accumulate_grad_hook(lambda weight, master=master: _move_gradient(weight, master))
        # Norms, biases and other vectors are not decayed, as is the custom for transformers.
        matrices = [master for master in self._masters if master.dim() > 1]
        vectors = [master for master in self._masters if master.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def step(self, denominator: float) -> float | None:
        """Divide the summed gradients by `denominator`, clip, step and clear. Returns the gradient norm before clipping.

        Returns None, and leaves the weights alone, if a gradient is not finite.
        """
        gradients = [master.grad for master in self._masters if master.grad is not None]
        torch._foreach_div_(gradients, denominator)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters, self.config.max_grad_norm, torch.tensor(norm))
            for group in self._adamw.param_groups:
                group["lr"] = self.config.lr * self._schedule()
            self._adamw.step()
            self.steps += 1
            with torch.no_grad():
                for (_, weight), master in zip(self._named, self._masters):
                    if weight is not master:
                        weight.copy_(master)
        self.clear()
        return norm if math.isfinite(norm) else None

    def clear(self) -> None:
        """Forget the gradients, and give their memory back."""
        for master in self._masters:
            master.grad = None

    def _schedule(self) -> float:
        """Share of the full learning rate at the coming step."""
        warmup = self.config.warmup_steps
        if self.steps < warmup:
            return (self.steps + 1) / (warmup + 1)
        if self.config.schedule == "constant":
            return 1.0
        done = (self.steps - warmup) / max(1, self.total_steps - warmup)
        done = min(done, 1.0)
        return 0.5 * (1 + math.cos(math.pi * done)) if self.config.schedule == "cosine" else 1 - done

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Masters and moments by name, for a checkpoint; `load_state` takes the same names."""
        yield "steps", torch.tensor(self.steps)
        for (name, _), master in zip(self._named, self._masters):
            yield f"master/{name}", master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                yield f"{key}/{name}", value

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        with torch.no_grad():
            for (name, weight), master in zip(self._named, self._masters):
                master.copy_(state[f"master/{name}"])
                weight.copy_(master)
                kept = {
                    key: state[f"{key}/{name}"].clone()
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}/{name}" in state
                }
                if kept:
                    self._adamw.state[master] = kept


def _move_gradient(weight: Tensor, master: Tensor) -> None:
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad += weight.grad
    weight.grad = None
