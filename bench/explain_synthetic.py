"""Rollouts of a language-model-like generator, for faults that the bank of real ones does not hold at every strength.

Random logits over 64 tokens, an entropy that varies from position to position, samples of a prompt sharing their first
logits. All log-probs are exact, so raw, tempered and truncated ones are what an engine would return.
"""

from __future__ import annotations

import numpy as np

VOCABULARY = 64
NOISE = {"bf16": 0.05, "int8": 0.16}


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def generate(rng: np.random.Generator, fault: str, strength: float, engine: str, prompts: int = 32) -> dict:
    """`prompts` x 2 responses of 40 to 128 tokens under one fault of distribution, packed as in explain_confusion.py."""
    samples, longest = 2, 128
    rows = prompts * samples
    group = np.repeat(np.arange(prompts), samples)
    lengths = rng.integers(40, longest + 1, rows)
    scale = np.exp(rng.normal(1.1, 0.6, (prompts, longest, 1)))
    z = scale * rng.standard_normal((prompts, longest, VOCABULARY))
    z[..., 0] += 4 * scale[..., 0] * rng.random((prompts, longest))  # one favourite token, as in text
    z = np.repeat(z, samples, 0) + 0.05 * rng.standard_normal((rows, longest, VOCABULARY))
    learner = z + rng.standard_normal(z.shape) * NOISE["bf16"] / np.sqrt(2)
    sampler = z + rng.standard_normal(z.shape) * NOISE[engine] / np.sqrt(2)
    believed, mu_scale, pi_scale = 1.0, 1.0, 1.0
    if fault == "temperature-raw":
        believed = pi_scale = strength
        sampled = log_softmax(sampler / strength)
    elif fault == "temperature-learner":
        mu_scale = strength
        sampled = log_softmax(sampler / strength)
    else:
        sampled = log_softmax(sampler)
    mu, pi = log_softmax(sampler / mu_scale), log_softmax(learner / pi_scale)
    if fault.startswith("truncated"):
        sampled = mu = _truncate(sampled, fault.removeprefix("truncated-"), strength)
    token = (sampled + rng.gumbel(size=sampled.shape)).argmax(-1)
    pick = lambda table: np.take_along_axis(table, token[..., None], -1)[..., 0].astype(np.float32)  # noqa: E731
    kept = np.arange(longest) < lengths[:, None]
    return {
        "lengths": lengths,
        "mu": pick(mu)[kept],
        "pi": pick(pi)[kept],
        "ids": token[kept].astype(np.int32),
        "group": group.astype(float),
        "step": np.zeros(rows),
        "temperature": np.full(rows, believed),
        "engine": f"vllm:{engine}",
    }


def _truncate(logprob: np.ndarray, kind: str, strength: float) -> np.ndarray:
    order = np.sort(logprob, -1)[..., ::-1]
    if kind == "top-p":
        cumulative = np.cumsum(np.exp(order), -1)
        kept = (cumulative - np.exp(order) < strength).sum(-1)
        bound = np.take_along_axis(order, kept[..., None] - 1, -1)
    elif kind == "top-k":
        bound = order[..., int(strength) - 1 : int(strength)]
    else:
        bound = order[..., :1] + np.log(strength)
    return log_softmax(np.where(logprob >= bound, logprob, -np.inf))
