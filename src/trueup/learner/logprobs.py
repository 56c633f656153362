"""Log-probs and entropy of chosen tokens straight from hidden states, without ever holding [tokens, vocabulary].

z_v = softcap(multiplier * (h . W_v + b_v)) / T, log p(y) = z_y - logsumexp(z), H = logsumexp(z) - sum_v p_v z_v.
Forward and backward walk over chunks of tokens; the backward forms each chunk's logits again. Peak memory is
[chunk, vocabulary], in float32, as all of this arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Head:
    """A language model's output head as plain arithmetic."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V]."""
    multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Head:
        """Read the head of a transformers causal LM. Raises ValueError where it is not a linear layer."""
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise ValueError(
                f"the head of {type(model).__name__} is {type(linear).__name__}; trueup needs a linear head"
            )
        config = model.config.get_text_config()
        multiplier = getattr(config, "logit_scale", None) or 1.0
        multiplier /= getattr(config, "logits_scaling", None) or 1.0
        return cls(linear.weight, linear.bias, float(multiplier), getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[n, H] -> float32 [n, V] before the temperature; `weight` is the head's in float32."""
        logits = hidden.float() @ weight.T
        if self.bias is not None:
            logits += self.bias.float()
        if self.multiplier != 1.0:
            logits *= self.multiplier
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def token_logprobs(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature_N: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both float32 [N], both differentiable.

    hidden_NH: last hidden states of the positions that predict the targets. temperature_N: > 0, one a token.
    """
    return _TokenLogprobs.apply(hidden_NH, head.weight, head.bias, head, targets_N.long(), temperature_N, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, head, targets, temperature, chunk):
        exact = weight.float()
        logprobs, entropy, normaliser = (torch.empty(len(targets), device=hidden.device) for _ in range(3))
        for part in _chunks(len(targets), chunk):
            z = head.logits(hidden[part], exact).div_(temperature[part, None])
            lse = z.logsumexp(1)
            normaliser[part] = lse
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - lse
            entropy[part] = lse - z.sub(lse[:, None]).exp_().mul_(z).sum(1)
        ctx.save_for_backward(hidden, weight, targets, temperature, normaliser, entropy)
        ctx.head, ctx.chunk = head, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, temperature, normaliser, entropy = ctx.saved_tensors
        head, exact = ctx.head, weight.float()
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(exact) if needs_weight else None
        grad_bias = torch.zeros(len(weight), device=hidden.device) if needs_bias else None
        for part in _chunks(len(targets), ctx.chunk):
            logits = head.logits(hidden[part], exact)
            slope = 1 - (logits / head.softcap).square_() if head.softcap else None
            logp = logits.div_(temperature[part, None]).sub_(normaliser[part, None])
            up = torch.zeros(len(logp), 1, device=hidden.device) if grad_logprobs is None else grad_logprobs[part, None]
            # d log p(y) / dz = onehot(y) - p, dH / dz = -p (log p + H); one block of memory where no entropy is asked for
            if grad_entropy is None:
                grad = logp.exp_().mul_(-up)
            else:
                p = logp.exp()
                grad = logp.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(up).mul_(p).neg_()
            grad.scatter_add_(1, targets[part, None], up).div_(temperature[part, None])
            if slope is not None:
                grad *= slope
            if head.multiplier != 1.0:
                grad *= head.multiplier
            if needs_hidden:
                grad_hidden[part] = (grad @ exact).to(hidden.dtype)
            if needs_weight:
                grad_weight.addmm_(grad.T, hidden[part].float())
            if needs_bias:
                grad_bias += grad.sum(0)
        if needs_weight:
            grad_weight = grad_weight.to(weight.dtype)
        if needs_bias:
            grad_bias = grad_bias.to(head.bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunks(total: int, size: int):
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
