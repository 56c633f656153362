"""Log-probs and entropy of chosen tokens straight from hidden states, without ever holding [tokens, vocabulary].

z_v = softcap(multiplier * (h . W_v + b_v)) / T, log p(y) = z_y - logsumexp(z), H = logsumexp(z) - sum_v p_v z_v.
Forward and backward walk over blocks of tokens and vocabulary; the sums over the vocabulary are kept online, relative to
the largest logit so far (Milakov & Gimelshein 2018, arXiv 1805.02867), and the backward forms each block again. Peak memory
is one block, whatever the vocabulary and the number of tokens.

Logits are float32. Where hidden states and weights are bf16 their products are exact in float32, so the processor's bf16
units give the same numbers as its float32 units, two to five times as fast; only the backward's products round to bf16, as
the gradients that they become do.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_BLOCK = 1 << 22
"""Logits that exist at one time, 16 MiB."""


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

    def logits(self, hidden: Tensor, part: slice = slice(None), weight: Tensor | None = None) -> Tensor:
        """[n, H] -> float32 [n, v], before the temperature, of the vocabulary's `part`.

        weight: that part of the head in float32, where the caller keeps it.
        """
        weight = self.weight[part].float() if weight is None else weight
        with _bf16_units(hidden.dtype == self.weight.dtype == torch.bfloat16):
            logits = hidden.float() @ weight.T
        if self.bias is not None:
            logits += self.bias[part].float()
        if self.multiplier != 1.0:
            logits *= self.multiplier
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@contextmanager
def _bf16_units(allowed: bool):
    """Float32 products of numbers that are bf16 may run on the units for bf16 (on GPUs: TF32): nothing is lost."""
    before = torch.get_float32_matmul_precision()
    if allowed:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def token_logprobs(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature_N: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both float32 [N], both differentiable.

    hidden_NH: last hidden states of the positions that predict the targets. temperature_N: > 0, one a token.
    chunk: tokens a block.
    """
    return _TokenLogprobs.apply(hidden_NH, head.weight, head.bias, head, targets_N.long(), temperature_N, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, head, targets, temperature, chunk):
        ctx.cold = None if bool((temperature == 1).all()) else temperature[:, None]
        top, total, product, chosen = torch.zeros(4, len(targets), device=hidden.device)
        top.fill_(-torch.inf)
        for vocabulary in _vocabulary(len(weight), chunk):
            exact = weight[vocabulary].float()
            for part in _chunks(len(targets), chunk):
                z = head.logits(hidden[part], vocabulary, exact)
                if ctx.cold is not None:
                    z /= ctx.cold[part]
                here, at = _targets(targets[part], vocabulary)
                chosen[part] += torch.where(here, z.gather(1, at[:, None])[:, 0], 0)
                highest = torch.maximum(top[part], z.amax(1))
                fade = (top[part] - highest).exp_()
                p = (z - highest[:, None]).exp_()
                total[part] = total[part] * fade + p.sum(1)
                product[part] = product[part] * fade + p.mul_(z).sum(1)
                top[part] = highest
        normaliser = top + total.log()
        logprobs, entropy = chosen - normaliser, normaliser - product / total
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.head, ctx.chunk = head, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.zeros(len(weight), device=hidden.device) if needs_bias else None
        up = torch.zeros_like(normaliser) if grad_logprobs is None else grad_logprobs
        product_type = weight.dtype if weight.dtype == hidden.dtype else torch.float32
        for vocabulary in _vocabulary(len(weight), ctx.chunk):
            exact = weight[vocabulary].float()
            own_weight = torch.zeros_like(exact) if needs_weight else None
            for part in _chunks(len(targets), ctx.chunk):
                logits = head.logits(hidden[part], vocabulary, exact)
                slope = 1 - (logits / head.softcap).square_() if head.softcap else None
                if ctx.cold is not None:
                    logits /= ctx.cold[part]
                logp = logits.sub_(normaliser[part, None])
                # d log p(y) / dz = onehot(y) - p, dH / dz = -p (log p + H)
                if grad_entropy is None:
                    grad = logp.exp_().mul_(-up[part, None])
                else:
                    p = logp.exp()
                    grad = logp.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(up[part, None])
                    grad = grad.mul_(p).neg_()
                here, at = _targets(targets[part], vocabulary)
                grad.scatter_add_(1, at[:, None], torch.where(here, up[part], 0)[:, None])
                if ctx.cold is not None:
                    grad /= ctx.cold[part]
                if slope is not None:
                    grad *= slope
                if head.multiplier != 1.0:
                    grad *= head.multiplier
                if needs_bias:
                    grad_bias[vocabulary] += grad.sum(0)
                grad = grad.to(product_type)
                if needs_hidden:
                    grad_hidden[part] += grad @ weight[vocabulary].to(product_type)
                if needs_weight:
                    own_weight += grad.T @ hidden[part].to(product_type)
            if needs_weight:
                grad_weight[vocabulary] = own_weight
        grad_hidden = grad_hidden.to(hidden.dtype) if needs_hidden else None
        grad_bias = grad_bias.to(head.bias.dtype) if needs_bias else None
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _targets(targets: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in this part of the vocabulary, and where in it (0 for the others)."""
    here = (targets >= vocabulary.start) & (targets < vocabulary.stop)
    return here, torch.where(here, targets - vocabulary.start, 0)


def _vocabulary(size: int, chunk: int):
    """Parts of the vocabulary so that a block of `chunk` tokens stays within _BLOCK logits, and is worth a product."""
    return _chunks(size, max(1024, _BLOCK // chunk))


def _chunks(total: int, size: int):
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
