"""The reference sampler: plain transformers decoding, bf16 or fp32; also how the learner itself is evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trueup.learner.logprobs import Head
from trueup.learner.model import DTYPES, Policy, best_tokens
from trueup.rollouts import Rollouts, pack
from trueup.samplers.base import EngineError, Sampling, check_greedy, check_prompts


class TransformersSampler:
    """Decodes left-padded batches with a key/value cache; log-prob arithmetic in float32, as in the learner."""

    prefix_block = 0  # it keeps no prefixes between calls
    quantiser = None

    def __init__(self, model: nn.Module, precision: str, *, context: int, cache_gib: float = 2.0):
        """model: a causal LM, shared with whoever else holds it. cache_gib: keys and values held at one time, GiB."""
        self.model = model
        self.engine = f"transformers:{precision}"
        self.version = -1
        self._context = context
        self._token_budget = int(cache_gib * 2**30 / _bytes_a_token(model))

    @classmethod
    def from_config(cls, model: str, precision: str, *, context: int) -> TransformersSampler:
        """A sampler with weights of its own, which come with the first `load`."""
        if precision not in DTYPES:
            raise EngineError(f"transformers cannot run {precision!r}; vllm:int8 runs int8, transformers bf16 and fp32")
        config = AutoConfig.from_pretrained(model)
        own = AutoModelForCausalLM.from_config(config, dtype=DTYPES[precision]).eval()
        return cls(own.to("cuda" if torch.cuda.is_available() else "cpu"), precision, context=context)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        return self._generate(prompts, sampling, margins=False)[0]

    def generate_with_margins(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> tuple[Rollouts, Tensor]:
        check_greedy(sampling)
        return self._generate(prompts, sampling, margins=True)

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, margins: bool) -> tuple[Rollouts, Tensor]:
        check_prompts(prompts, sampling, self._context)
        rows = [list(map(int, prompt)) for prompt in prompts for _ in range(sampling.n)]
        noise_BT = _noise(len(rows), sampling)
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        drawn: list[tuple[list[int], list[float], list[float]]] = [([], [], [])] * len(rows)
        while order:
            width = len(rows[order[0]]) + sampling.max_tokens
            batch, order = order[: max(1, self._token_budget // width)], order[max(1, self._token_budget // width) :]
            for row, response in zip(
                batch, self._decode([rows[row] for row in batch], noise_BT[batch], sampling, margins)
            ):
                drawn[row] = response
        stops = set(sampling.stop_token_ids)
        rollouts = Rollouts.from_lists(
            rows,
            [ids for ids, _, _ in drawn],
            [logprobs for _, logprobs, _ in drawn],
            sampler_version=self.version,
            group=[row // sampling.n for row in range(len(rows))],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            finish_reason=["stop" if ids[-1] in stops else "length" for ids, _, _ in drawn],
            engine=self.engine,
        )
        return rollouts, pack([margins for _, _, margins in drawn], torch.float32)

    def _decode(
        self, prompts: list[list[int]], noise_BT: Tensor, sampling: Sampling, margins: bool
    ) -> list[tuple[list[int], list[float], list[float]]]:
        device, count, width = self.model.device, len(prompts), max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        position_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
        stop = torch.tensor(sampling.stop_token_ids, device=device)
        tokens = torch.zeros(count, sampling.max_tokens, dtype=torch.int64)
        logprobs = torch.zeros(count, sampling.max_tokens)
        ahead = torch.zeros(count, sampling.max_tokens)  # the margin of each token, where it is asked for
        lengths = torch.full((count,), sampling.max_tokens)
        alive = torch.arange(count)  # the row that each row of the shrinking batch stands for
        cache, warp, head = DynamicCache(config=self.model.config), _warpers(sampling), Head.of(self.model)
        exact = head.weight.float()
        for step in range(sampling.max_tokens):
            hidden = self.model.base_model(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                position_ids=position_BT,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            logits_BV = head.logits(hidden, weight=exact)
            token_B, logprob_B = _draw(logits_BV, noise_BT[alive, step], sampling, warp)
            if margins:  # log-probs lie as far apart as their logits
                best_B2 = logits_BV.topk(2).values
                ahead[alive, step] = (best_B2[:, 0] - best_B2[:, 1]).float().cpu()
            tokens[alive, step], logprobs[alive, step] = token_B.cpu(), logprob_B.cpu()
            finished = torch.isin(token_B, stop).cpu()
            lengths[alive[finished]] = step + 1
            if step + 1 == sampling.max_tokens or bool(finished.all()):
                break
            ids_BT, position_BT = token_B[:, None], position_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=1)
            if finished.any():
                keep = (~finished).nonzero()[:, 0]
                cache.batch_select_indices(keep.to(device))
                alive, ids_BT, position_BT, mask_BT = alive[keep], ids_BT[keep], position_BT[keep], mask_BT[keep]
        return [
            (tokens[row, :length].tolist(), logprobs[row, :length].tolist(), ahead[row, :length].tolist())
            for row, length in enumerate(lengths.tolist())
        ]

    def score(self, rollouts: Rollouts) -> Tensor:
        at_one = rollouts.rows(range(len(rollouts)))
        at_one.temperature = torch.ones(len(rollouts))
        return Policy(self.model).score(at_one)[0]

    def best_tokens(self, rollouts: Rollouts) -> Tensor:
        return best_tokens(Policy(self.model), rollouts)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = self.model.state_dict()
        for name, weight in weights:
            if name not in own:
                raise EngineError(
                    f"weight {name!r} does not belong to this model; is sampler and learner the same architecture?"
                )
            own[name].copy_(weight)
        self.version = version

    def close(self) -> None:
        self.model = None


def _bytes_a_token(model: nn.Module) -> int:
    """Keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize


def _noise(count: int, sampling: Sampling) -> Tensor:
    """Uniform draws [count, max_tokens]: each response has a generator of its own, so the batch's make-up is no matter."""
    if sampling.seed is None:
        return torch.rand(count, sampling.max_tokens, dtype=torch.float64)
    rows = []
    for row in range(count):
        generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + row)
        rows.append(torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.top_k != -1:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


def _draw(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling, warp: LogitsProcessorList) -> tuple[Tensor, Tensor]:
    """One token a row by inverse transform, and its log-prob as sampled from; greedy takes the largest logit."""
    if sampling.temperature == 0:
        logprob_BV = logits_BV.log_softmax(-1)
        token_B = logits_BV.argmax(-1)
    else:
        logprob_BV = warp(None, logits_BV / sampling.temperature).log_softmax(-1)
        total_BV = logprob_BV.exp().double().cumsum(-1)
        point_B1 = uniform_B.to(total_BV.device)[:, None] * total_BV[:, -1:]
        token_B = torch.searchsorted(total_BV, point_B1, right=True)[:, 0]
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]
