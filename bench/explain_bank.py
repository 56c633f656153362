"""Labelled real rollouts for `trueup explain`: one model, sampled by vLLM, scored by transformers under many faults.

    python bench/explain_bank.py sample MODEL GSM8K.jsonl --out BANK      # bf16, T=0.6, T=1.3 and int8, GSM8K questions
    python bench/explain_bank.py tune MODEL GSM8K.jsonl --out BANK        # what the learner may have become: SFT and RL steps
    python bench/explain_bank.py score MODEL GSM8K.jsonl --out BANK       # learner log-probs under each variant
    python bench/explain_bank.py engine MODEL GSM8K.jsonl --out BANK      # stale prefix caches and truncated supports

A set is the responses of one sampling run, `BANK/SET.parquet` (Rollouts; learner_logprobs are the healthy ones). A variant
is another learner, `BANK/SET.VARIANT.npy`: float32 log-probs of the same tokens under another prompt or other weights.
Whatever exists is not made again. Every faulty dump of bench/explain_confusion.py is put together from these.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch
from explain_variants import (
    ON_OTHER_SETS,
    PROMPTS,
    RETOKENISED,
    WEIGHTS,
    in_turn,
    prompt_ids,
    prompt_text,
    recut,
    with_weights,
)

from trueup.config import OptimizerConfig
from trueup.learner.logprobs import Head, token_logprobs
from trueup.learner.model import Policy, load_causal_lm, load_tokenizer, stop_token_ids
from trueup.learner.optimizer import MasterAdamW
from trueup.rollouts import Rollouts
from trueup.samplers import Sampling, open_sampler

LONGEST = 128
SAMPLES = 2
INSTRUCTIONS = (
    "Give the final answer after ####.",
    "Think step by step. Then give the answer on a last line of its own, in this form: #### <number>",
    "Solve the problem. Show your work briefly and end with the number.",
)
# Set -> first question of the file, prompts, engine, temperature. Questions do not overlap.
SETS = {
    "bf16": (0, 32, "vllm:bf16", 1.0),
    "t06": (40, 24, "vllm:bf16", 0.6),
    "t13": (70, 16, "vllm:bf16", 1.3),
    "int8": (100, 24, "vllm:int8", 1.0),
    "t09": (170, 16, "vllm:bf16", 0.9),
    "t12": (190, 16, "vllm:bf16", 1.2),
}
# Real engine runs with other support, on the questions from 140 on: name -> sampling.
TRUNCATED = {
    "topp95": {"top_p": 0.95},
    "topp80": {"top_p": 0.8},
    "topk20": {"top_k": 20},
    "topk5": {"top_k": 5},
    "minp05": {"min_p": 0.05},
    "minp02": {"min_p": 0.02},
}


def questions(path: str, start: int, count: int) -> list[tuple[str, str]]:
    rows = [json.loads(line)["question"].strip() for line in Path(path).read_text("utf-8").splitlines()]
    return [(rows[i], INSTRUCTIONS[i % len(INSTRUCTIONS)]) for i in range(start, start + count)]


# --- scoring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prefill(model, prompt: list[int]):
    """(keys and values, last hidden state [H]) of a prompt."""
    found = model.base_model(input_ids=torch.tensor([prompt]), use_cache=True)
    return found.past_key_values, found.last_hidden_state[0, -1]


@torch.no_grad()
def score(model, prompts: list[list[int]], rollouts: Rollouts, prefixes: list | None = None) -> np.ndarray:
    """float32 [N]: the responses of a group under prompts[group]; its samples share the prompt's keys and values.

    `prefixes`: those keys and values, computed before under other weights: a stale cache.
    """
    head, found = Head.of(model), np.empty(rollouts.tokens, np.float32)
    for group in range(len(prompts)):
        rows = torch.nonzero(rollouts.group == group).flatten().tolist()
        if not rows:
            continue
        if prefixes is None:
            cached, last = prefill(model, prompts[group])
        else:  # As engines do, all but the last token come from the cache; that one is computed anew.
            cached = copy.deepcopy(prefixes[group])
            ids = torch.tensor([prompts[group][-1:]])
            last = model.base_model(input_ids=ids, past_key_values=cached, use_cache=True).last_hidden_state[0, -1]
        cache = copy.deepcopy(cached)
        cache.batch_repeat_interleave(len(rows))
        lengths = [int(rollouts.lengths[row]) for row in rows]
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for k, row in enumerate(rows):
            padded[k, : lengths[k]] = rollouts.response(row).long()
        later = model.base_model(input_ids=padded[:, :-1], past_key_values=cache, use_cache=True).last_hidden_state
        for k, row in enumerate(rows):
            hidden = torch.cat([last[None], later[k, : lengths[k] - 1]])
            heat = torch.full((lengths[k],), float(rollouts.temperature[row]))
            values, _ = token_logprobs(hidden, head, padded[k, : lengths[k]], heat, 1024)
            at = int(rollouts.offsets[row])
            found[at : at + lengths[k]] = values.numpy()
    return found


# --- other weights --------------------------------------------------------------------------------------------------


def tune(arguments) -> None:
    """`BANK/sft{1,2,4,8}.pt` and `rl{2,4}.pt`: the change of each weight after so many steps of AdamW, bf16."""
    tokenizer = load_tokenizer(arguments.model)
    rows = [json.loads(line) for line in Path(arguments.gsm8k).read_text("utf-8").splitlines()[600:700]]
    plans = {"sft": (1, 2, 4, 8), "rl": (2, 4)}
    for name, marks in plans.items():
        if (arguments.out / f"{name}{marks[-1]}.pt").exists():
            continue
        model = load_causal_lm(arguments.model, "bf16")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        policy = Policy(model)
        optimizer = MasterAdamW(model, OptimizerConfig(lr=1e-5, warmup_steps=0), total_steps=100)
        for step in range(1, marks[-1] + 1):
            began = time.monotonic()
            if name == "sft":
                part = rows[4 * step : 4 * step + 4]
                prompts = [
                    tokenizer.encode(prompt_text(row["question"].strip(), INSTRUCTIONS[0]), add_special_tokens=False)
                    for row in part
                ]
                answers = [tokenizer.encode(row["answer"] + "<|im_end|>")[:LONGEST] for row in part]
                batch = Rollouts.from_lists(prompts, answers)
                weight_N = torch.full((batch.tokens,), 1.0 / batch.tokens)
            else:
                sampled = Rollouts.from_parquet(arguments.out / "bf16.parquet")
                batch = sampled.rows(torch.arange(8 * step - 8, 8 * step - 4))
                signs = torch.tensor([1.0, -1.0] * 2)
                weight_N = torch.repeat_interleave(signs, batch.lengths) / batch.tokens
            logprobs_N, _ = policy(batch)
            (-(logprobs_N * weight_N).sum()).backward()
            optimizer.step(1)
            print(f"{name} step {step}: {time.monotonic() - began:.0f} s", flush=True)
            if step in marks:
                change = {key: value - before[key] for key, value in model.state_dict().items()}
                torch.save(change, arguments.out / f"{name}{step}.pt")
        del model, optimizer, policy


def score_variants(arguments) -> None:
    tokenizer = load_tokenizer(arguments.model)
    model = load_causal_lm(arguments.model, "bf16").eval()
    original = {key: value.clone() for key, value in model.state_dict().items()}
    everything = [name for names in in_turn() for name in names]
    current = ""
    for kind in arguments.sets:
        start, count, _, _ = SETS[kind]
        names = arguments.only or (everything if kind == "bf16" else ON_OTHER_SETS)
        rollouts = Rollouts.from_parquet(arguments.out / f"{kind}.parquet")
        for name in names:
            target = arguments.out / f"{kind}.{name}.npy"
            if target.exists() or (arguments.only and name not in arguments.only):
                continue
            began = time.monotonic()
            source = WEIGHTS.get(name.removeprefix("stale-"), (None,))[0]
            if source and not (arguments.out / f"{source}.pt").exists():
                continue
            wanted = name if name in WEIGHTS else ""
            if wanted != current:
                with torch.no_grad():
                    if wanted:
                        with_weights(model, arguments.out, wanted, original)
                    else:
                        model.load_state_dict(original)
                current = wanted
            variant = name if name in PROMPTS else ""
            prompts = prompt_ids(tokenizer, questions(arguments.gsm8k, start, count), variant)
            prefixes = None
            if name.startswith("stale-"):
                with torch.no_grad():
                    with_weights(model, arguments.out, name.removeprefix("stale-"), original)
                prefixes = [prefill(model, prompt[:-1])[0] for prompt in prompts]
                model.load_state_dict(original)
            cut = recut(tokenizer, rollouts, name) if name in (*RETOKENISED, "tool") else rollouts
            found = score(model, prompts, cut, prefixes)
            np.save(target, found)
            gap = found - rollouts.sampler_logprobs.numpy()
            print(
                f"{kind} {name}: mean |log rho| {np.abs(gap).mean():.4f}, k1 {-gap.mean():.4f}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


# --- engines --------------------------------------------------------------------------------------------------------


def learner_score(policy: Policy, rollouts: Rollouts) -> None:
    rollouts.learner_logprobs, _ = policy.score(rollouts)
    rollouts.learner_version[:] = 0


def sample(arguments) -> None:
    tokenizer = load_tokenizer(arguments.model)
    model = load_causal_lm(arguments.model, "bf16").eval()
    policy, stops = Policy(model, token_budget=1024), stop_token_ids(tokenizer, model)
    for engine in ("vllm:bf16", "vllm:int8"):
        wanted = [k for k, plan in SETS.items() if plan[2] == engine and not (arguments.out / f"{k}.parquet").exists()]
        if not wanted:
            continue
        sampler = open_sampler(engine, arguments.model, context=512, max_sequences=128)
        sampler.load(policy.weights(), 0)
        for kind in wanted:
            start, count, _, heat = SETS[kind]
            prompts = prompt_ids(tokenizer, questions(arguments.gsm8k, start, count))
            began = time.monotonic()
            sampling = Sampling(max_tokens=LONGEST, stop_token_ids=stops, n=SAMPLES, temperature=heat, seed=start)
            rollouts = sampler.generate(prompts, sampling)
            middle = time.monotonic()
            learner_score(policy, rollouts)
            rollouts.to_parquet(arguments.out / f"{kind}.parquet")
            print(
                f"{kind}: {rollouts.tokens} tokens, sampled in {middle - began:.0f} s, scored in "
                f"{time.monotonic() - middle:.0f} s",
                flush=True,
            )
            if heat != 1:
                np.save(arguments.out / f"{kind}.raw-sampler.npy", sampler.score(rollouts).numpy())
        sampler.close()


def engine_faults(arguments) -> None:
    """Truncated supports and prefixes cached under other weights, by the real engine in bf16."""
    tokenizer = load_tokenizer(arguments.model)
    model = load_causal_lm(arguments.model, "bf16").eval()
    original = {key: value.clone() for key, value in model.state_dict().items()}
    policy, stops = Policy(model, token_budget=1024), stop_token_ids(tokenizer, model)
    sampler = open_sampler("vllm:bf16", arguments.model, context=512, max_sequences=128)
    print("prefix block", sampler.prefix_block, flush=True)
    plans = [("cache-" + name, {}) for name in ("sft2", "rl4-quarter", "sft1")] + list(TRUNCATED.items())
    for number, (name, options) in enumerate(plans):
        target = arguments.out / f"{name}.parquet"
        if target.exists() or (arguments.only and name not in arguments.only):
            continue
        prompts = prompt_ids(tokenizer, questions(arguments.gsm8k, 140, 24))
        sampling = Sampling(max_tokens=LONGEST, stop_token_ids=stops, n=SAMPLES, seed=500 + number, **options)
        with torch.no_grad():
            model.load_state_dict(original)
        sampler.load(policy.weights(), 0)
        if name.startswith("cache-"):
            stale = list(range(0, len(prompts), 2))
            once = Sampling(max_tokens=1, stop_token_ids=stops, n=1, seed=1)
            sampler.generate([prompts[group] for group in stale], once)
            with torch.no_grad():
                with_weights(model, arguments.out, name.removeprefix("cache-"), original)
            forget, sampler.forget_prefixes = sampler.forget_prefixes, lambda: None
            sampler.load(policy.weights(), 1)
            sampler.forget_prefixes = forget
        began = time.monotonic()
        rollouts = sampler.generate(prompts, sampling)
        middle = time.monotonic()
        rollouts.top_p[:], rollouts.top_k[:], rollouts.min_p[:] = 1.0, -1, 0.0  # what the run believed
        learner_score(policy, rollouts)
        rollouts.to_parquet(target)
        print(
            f"{name}: {rollouts.tokens} tokens, {middle - began:.0f} s, {time.monotonic() - middle:.0f} s", flush=True
        )
    sampler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("sample", "tune", "score", "engine"))
    parser.add_argument("model", help="folder of a chat model with the ChatML template")
    parser.add_argument("gsm8k", help="JSONL with question and answer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=["bf16", "int8", "t06"])
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    {"sample": sample, "tune": tune, "score": score_variants, "engine": engine_faults}[arguments.stage](arguments)


if __name__ == "__main__":
    main()
