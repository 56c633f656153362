"""The variants of bench/explain_bank.py: other prompts, other cuts of the text, other weights, stale prefixes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trueup.rollouts import Rollouts

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SHOT = (
    "A baker sells 12 loaves in the morning and 9 in the afternoon. How many does she sell in 3 days?",
    "She sells 12 + 9 = 21 loaves a day. In 3 days that is 3 * 21 = 63.\n#### 63",
)


# --- prompts --------------------------------------------------------------------------------------------------------


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def prompt_text(question: str, instruction: str, variant: str = "") -> str:
    """What the chat template renders, and what it renders under each fault of the prompt."""
    system, user, open_turn, before, shots = turn("system", SYSTEM), f"{question} {instruction}", True, "", ""
    end = ""
    if variant in ("no-system", "no-system-instruction"):
        system = ""
    if variant == "other-system":
        system = turn("system", "You are a careful mathematics tutor. Answer in full sentences.")
    if variant == "dated-system":
        system = turn("system", SYSTEM + " Today is Tuesday, 1 December 2026.")
    if variant in ("other-instruction", "no-system-instruction"):
        user = f"{question} Please reason carefully, and put the final answer within \\boxed{{}}."
    if variant == "no-instruction":
        user = question
    if variant == "few-shot":
        shots = turn("user", f"{SHOT[0]} {instruction}") + turn("assistant", SHOT[1])
    if variant == "no-generation":
        open_turn = False
    if variant == "newline":
        end = "\n"
    if variant == "double-bos":
        before = "<|endoftext|>"
    if variant == "padded":
        before = "<|endoftext|>" * 24
    if variant == "raw":
        return user + "\n"
    return before + system + shots + turn("user", user) + ("<|im_start|>assistant\n" if open_turn else "") + end


PROMPTS = (
    "no-system-instruction",
    "other-system",
    "raw",
    "other-instruction",
    "no-system",
    "few-shot",
    "no-instruction",
    "no-generation",
    "padded",
    "dated-system",
    "newline",
    "double-bos",
    "cut-left",
    "swapped",
)


def prompt_ids(tokenizer, asked: list[tuple[str, str]], variant: str = "") -> list[list[int]]:
    rows = [tokenizer.encode(prompt_text(*pair, variant), add_special_tokens=False) for pair in asked]
    if variant == "cut-left":  # a prompt length that is shorter on one side
        rows = [row[-max(48, len(row) // 2) :] for row in rows]
    if variant == "swapped":  # prompts paired with the responses of their neighbours
        rows = rows[1:] + rows[:1]
    return rows


# --- other tokens ---------------------------------------------------------------------------------------------------

# The response's text, cut anew: characters a piece, each piece encoded by itself; 0: words and the spaces between them.
RETOKENISED = {"retok-24": 24, "retok-words": 0, "retok-8": 8}


def cut_anew(tokenizer, ids: list[int], length: int) -> list[int]:
    """As many ids as before, of other pieces of the same text; short texts are padded with their last id."""
    text = tokenizer.decode(ids)
    pieces = [text[i : i + length] for i in range(0, len(text), length)] if length else re.split(r"(?<=\S)( )", text)
    found = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return (found + found[-1:] * len(ids))[: len(ids)]


# What tools answer. The variant `tool` is the learner's opinion of such text in the place of the response.
TOOLS = (
    '{{"status": 200, "results": [{{"id": {0}, "title": "Prices {1}", "score": 0.{2}}}, {{"id": {1}, "score": 0.{0}}}]}}\n',
    'Traceback (most recent call last):\n  File "run_{0}.py", line {1}, in <module>\nNameError: x{2} is not defined\n',
    "<output>{0}.{1}</output> elapsed={2}ms exit=0\n",
    "[{0}] Retrieved from index shard-{1}: the museum opens at {2}:00, closed on Mondays; see also doc {0}-{2}.\n",
)


def tool_ids(tokenizer, row: int, count: int) -> list[int]:
    rng, ids = np.random.default_rng(row), []
    while len(ids) < count:
        text = TOOLS[int(rng.integers(len(TOOLS)))].format(*rng.integers(10, 9999, 3))
        ids += tokenizer.encode(text, add_special_tokens=False)
    return ids[:count]


def recut(tokenizer, rollouts: Rollouts, name: str) -> Rollouts:
    rows = [
        tool_ids(tokenizer, row, int(rollouts.lengths[row]))
        if name == "tool"
        else cut_anew(tokenizer, rollouts.response(row).tolist(), RETOKENISED[name])
        for row in range(len(rollouts))
    ]
    return replace(rollouts, response_ids=torch.tensor([token for row in rows for token in row], dtype=torch.int32))


# --- other weights --------------------------------------------------------------------------------------------------

# Variant -> (change, multiple, which weights). `lowrank` keeps the 8 largest singular directions.
WEIGHTS = {
    "sft8": ("sft8", 1.0, "all"),
    "sft2": ("sft2", 1.0, "all"),
    "rl4": ("rl4", 1.0, "all"),
    "layers12": ("sft8", 1.0, "layers12"),
    "attention-lora": ("sft8", 2.0, "attention lowrank"),
    "mlp": ("sft4", 1.0, "mlp"),
    "sft1": ("sft1", 1.0, "all"),
    "sft4": ("sft4", 1.0, "all"),
    "layers4": ("sft8", 1.5, "layers4"),
    "head": ("sft8", 2.0, "head"),
    "mlp-lora": ("sft8", 3.0, "mlp lowrank"),
    "rl4-quarter": ("rl4", 0.25, "all"),
    "rl2-fifth": ("rl2", 0.2, "all"),
    "rl2-half": ("rl2", 0.5, "all"),
    "sft1-third": ("sft1", 0.33, "all"),
    "layer1": ("sft8", 3.0, "layers1"),
    "embedding": ("sft8", 3.0, "embedding"),
    "bias-missing": (None, 0.0, "bias"),
}
ON_OTHER_SETS = (
    "sft1", "no-system", "retok-24", "rl4-quarter", "other-system", "layers12", "other-instruction", "sft4", "few-shot",
    "attention-lora", "no-system-instruction", "retok-words", "head", "raw", "mlp", "no-instruction", "layer1",
)  # fmt: skip


def with_weights(model, out: Path, name: str, original: dict) -> None:
    """Sets the model's weights to the original ones plus the variant's change."""
    source, multiple, which = WEIGHTS[name]
    change = torch.load(out / f"{source}.pt", mmap=True) if source else {}
    for key, weight in model.state_dict().items():
        moved = original[key].float()
        if which == "bias" and key.endswith(("q_proj.bias", "k_proj.bias")) and int(key.split(".")[2]) >= 18:
            moved = torch.zeros_like(moved)
        elif source and _chosen(key, which):
            delta = change[key].float()
            if "lowrank" in which and delta.dim() == 2:
                u, s, v = torch.svd_lowrank(delta, q=8)
                delta = u @ torch.diag(s) @ v.T
            moved = moved + multiple * delta
        weight.copy_(moved.to(weight.dtype))


def _chosen(key: str, which: str) -> bool:
    layer = int(key.split(".")[2]) if ".layers." in key else None
    if which.startswith("layers"):
        first, count = {"layers12": (12, 12), "layers4": (6, 4), "layers1": (10, 1)}[which]
        return layer is not None and first <= layer < first + count
    if which.startswith("attention"):
        return "self_attn" in key and key.endswith("weight")
    if which.startswith("mlp"):
        return ".mlp." in key
    return {"all": True, "head": "lm_head" in key, "embedding": "embed_tokens" in key}[which]


STALE = ("stale-sft2", "stale-rl4-quarter", "stale-sft8")
"""Prompts whose keys and values were computed under other weights."""


def in_turn() -> list[list[str]]:
    """Variants of all kinds in turn, so that a run cut short holds each."""
    pairs = []
    for k in range(max(len(PROMPTS), len(WEIGHTS))):
        pairs.append(
            [*PROMPTS[k : k + 1], *list(WEIGHTS)[k : k + 1], *["tool", *RETOKENISED][k : k + 1], *STALE[k : k + 1]]
        )
    return pairs
