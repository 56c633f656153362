"""The mini model: a 1M-parameter Qwen3 that speaks the `sums` format, and why RL has work to do on it.

It is taught, by supervised learning, from demonstrations of a pupil with a bad habit: when the ones digits of a step add
up to ten or more, the pupil often forgets the carry (17+25=32), and goes on from the wrong total. How often depends on the
ones digits (`FORGETTING`): nearly always when they barely reach ten, seldom when they go far beyond. Steps without a
carry are always right, and the final number is always the last total.

So the model *can* add, and mostly does not: its most likely answer repeats the habit where the pupil usually forgot, and
sampling finds the right way now and then. RL rewards only the right final number, which is enough to break the habit.
That is on purpose and by construction: a small, honest image of post-training, where RL elicits what imitation left
latent. It shows nothing about RL teaching a skill the model does not have.

The second thing done on purpose: `add_outliers`. Large language models have a few channels whose activations are far larger
than the rest, and these are what int8 activations cannot hold; a model this small grows none, and int8 rollouts would match
it so closely that there was nothing to correct. One channel per norm is therefore scaled up, and the weights that read it
scaled down, which changes no logit but brings the mismatch of int8 rollouts near that of real models: in k3 (about 1e-3) and
in its largest values, not in its mean, because most tokens of a sum are certain.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trueup.tasks.sums import Sums, work_out

FORGETTING = {10: 0.97, 11: 0.93, 12: 0.85, 13: 0.40, 14: 0.30, 15: 0.20, 16: 0.10, 17: 0.05, 18: 0.05}
"""Sum of the two ones digits -> share of the demonstrated steps that forget the carry.

Greedy decoding goes wrong from 10 to 12, so 40% of the problems start right; graded, so that RL breaks the habit
one sum after another over tens of steps instead of all at once.
"""

OUTLIER_SCALE = 64
"""A power of two, so that scaling is exact in bf16. Measured k3 of int8 rollouts: 1e-5 at 16, 6e-4 at 64, 6e-2 at 128."""

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
IGNORED = -100


def make_mini(
    out_dir: str | Path,
    seed: int = 0,
    steps: int = 1500,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    progress: Callable[[int, int, float], None] | None = None,
) -> Path:
    """Teach a mini model and write it as a Hugging Face folder, bf16, loadable by transformers and vLLM.

    out_dir: created if missing; a folder that holds a model already is refused.
    seed: of the initial weights, the problems and the pupil's lapses. Same seed, machine and thread count: same bytes.
    steps: optimiser steps of `batch_size` demonstrations.
    learning_rate: peak of AdamW after 5% warm-up, cosine to zero. High, because the model is small and training short.
    progress: called after each step with (steps done, steps in all, loss in nats per response token).
    """
    out_dir = Path(out_dir)
    if steps < 1 or batch_size < 1:
        raise ValueError(f"mini: steps={steps}, batch_size={batch_size}; both must be 1 or more")
    if (out_dir / "config.json").exists():
        raise ValueError(f"mini: {out_dir} holds a model already; give an empty folder, or remove that one first")
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warmup_cosine(step, steps))
    batches = demonstrations(seed, batch_size)
    model.train()
    for step in range(steps):
        input_ids, labels = collate(next(batches), tokenizer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps, loss.item())
    add_outliers(model)
    save(model, tokenizer, out_dir)
    return out_dir


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII and newline, after <pad> and <eos>. Adds no special token by itself."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """1.05M parameters with random weights.

    Every linear layer's sizes are multiples of 64 and the head size is 32: vLLM's int8 and attention kernels on CPU take
    these. Attention is eager because torch's fused backward is slower than it on CPU at this size.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def add_outliers(model: Qwen3ForCausalLM, scale: int = OUTLIER_SCALE) -> None:
    """Scale up the strongest channel of each layer's two norms, and scale down the weight columns that read it.

    The function stays the same, bit for bit where `scale` is a power of two. Per-token int8 activations lose: their step
    is set by the largest channel, and grows with it for all the others.
    """
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            channel = norm.weight.abs().argmax()
            norm.weight[channel] *= scale
            for reader in readers:
                reader.weight[:, channel] /= scale


def demonstrations(seed: int, batch_size: int) -> Iterator[list[tuple[str, str]]]:
    """Batches of (prompt, the pupil's response), from the train split only."""
    task, lapses, index = Sums(seed=seed), random.Random(f"lapses/{seed}"), 0

    def add(total: int, addend: int) -> int:
        ones = total % 10 + addend % 10
        forgotten = ones >= 10 and lapses.random() < FORGETTING[ones]
        return total + addend - 10 * forgotten

    while True:
        batch = []
        for _ in range(batch_size):
            numbers = task.train.numbers(index)
            batch.append(("+".join(map(str, numbers)) + "=", work_out(numbers, add)))
            index += 1
        yield batch


def collate(batch: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """(prompt, response) texts -> input ids and labels [batch, length]; padded on the right, prompts not learned."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(response)) for prompt, response in batch]
    length = max(len(prompt) + len(response) for prompt, response in rows) + 1
    input_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), IGNORED)
    for row, (prompt, response) in enumerate(rows):
        ids = torch.tensor([*prompt, *response, tokenizer.eos_token_id])
        input_ids[row, : len(ids)] = ids
        labels[row, len(prompt) : len(ids)] = ids[len(prompt) :]
    return input_ids, labels


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out_dir: Path) -> None:
    """The bf16 folder. The generation config says where to stop and nothing else: no top-k or top-p slips in."""
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def _warmup_cosine(step: int, steps: int) -> float:
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
