"""How often `trueup explain` names the right cause: every cause injected at three strengths into healthy rollouts.

    python bench/explain_confusion.py --draws 40 [--dumps DIR]

Rollouts are drawn from a language-model-like generator: random logits over 64 tokens, an entropy that varies from position
to position, samples of a group sharing their prompt and first tokens. All log-probs are exact, so raw, tempered and
truncated ones are what an engine would return. With --dumps, faults of single values and positions are also injected into
random halves (by group) of the healthy dumps of that folder. Prints the confusion matrix, one row a cause and strength.
"""

from __future__ import annotations

import argparse
import collections
import glob
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trueup.explain.verdict import explain

VOCABULARY = 64
NOISE = {"bf16": 0.05, "int8": 0.16}
STRENGTHS = {
    "temperature": (0.9, 1.2, 0.6),
    "temperature-learner": (0.9, 1.2, 0.7),
    "truncated-top-p": (0.95, 0.9, 0.8),
    "truncated-top-k": (16, 8, 4),
    "truncated-min-p": (0.02, 0.05, 0.1),
    "misaligned": (0.1, 0.5, 1.0),
    "placeholder-eos": (0.0, 1.0, -1.0),
    "placeholder-scattered": (0.01, 0.02, 0.1),
    "missing": (0.005, 0.03, 0.3),
    "observation": (8, 16, 32),
    "retokenised": (0.25, 0.5, 1.0),
    "weights-growing": (0.15, 0.3, 1.0),
    "weights-constant": (0.25, 0.5, 1.0),
    "cache": (0.25, 0.5, 1.0),
    "prompt": (0.5, 1.0, 2.0),
}
ON_DUMPS = (
    "healthy",
    "misaligned",
    "placeholder-eos",
    "placeholder-scattered",
    "missing",
    "observation",
    "retokenised",
)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def generate(rng: np.random.Generator, fault: str, strength: float, engine: str) -> dict:
    """32 prompts x 2 responses of 40 to 128 tokens under one fault of distribution or logits."""
    groups, samples, longest = 32, 2, 128
    rows = groups * samples
    group = np.repeat(np.arange(groups), samples)
    step = group * 4 // groups if fault == "weights-growing" else np.zeros(rows, int)
    lengths = rng.integers(40, longest + 1, rows)
    scale = np.exp(rng.normal(1.1, 0.6, (groups, longest, 1)))
    z = scale * rng.standard_normal((groups, longest, VOCABULARY))
    z[..., 0] += 4 * scale[..., 0] * rng.random((groups, longest))  # one favourite token, as in text
    z = np.repeat(z, samples, 0) + 0.05 * rng.standard_normal((rows, longest, VOCABULARY))
    learner = z + rng.standard_normal(z.shape) * NOISE["bf16"] / np.sqrt(2)
    sampler = z + rng.standard_normal(z.shape) * NOISE[engine] / np.sqrt(2)
    if fault in ("weights-growing", "weights-constant", "cache", "prompt"):
        learner = learner + _other_logits(rng, fault, strength, z, group, step)
    believed, mu_scale, pi_scale = 1.0, 1.0, 1.0
    if fault == "temperature":
        believed = strength
        sampled = log_softmax(sampler / strength)
        pi_scale = strength
    elif fault == "temperature-learner":
        sampled = log_softmax(sampler / strength)
        mu_scale = strength
    else:
        sampled = log_softmax(sampler)
    mu, pi = log_softmax(sampler / mu_scale), log_softmax(learner / pi_scale)
    if fault.startswith("truncated"):
        sampled = mu = _truncate(sampled, fault.removeprefix("truncated-"), strength)
    gumbel = rng.gumbel(size=sampled.shape)
    token = (sampled + gumbel).argmax(-1)
    pick = lambda table: np.take_along_axis(table, token[..., None], -1)[..., 0].astype(np.float32)  # noqa: E731
    mu, pi = pick(mu), pick(pi)
    return {
        "sampler": [mu[i, :n] for i, n in enumerate(lengths)],
        "learner": [pi[i, :n] for i, n in enumerate(lengths)],
        "ids": [token[i, :n] for i, n in enumerate(lengths)],
        "group": group,
        "step": step,
        "temperature": np.full(rows, believed),
        "engine": f"vllm:{engine}",
    }


def _other_logits(rng, fault, strength, z, group, step) -> np.ndarray:
    """A perturbation of the learner's logits, correlated along the response as text is."""
    rows, longest, vocabulary = z.shape
    base = rng.standard_normal((group.max() + 1, longest, vocabulary))
    memory = 0.35 if fault != "prompt" else 0.2
    for t in range(1, longest):
        base[:, t] = memory * base[:, t - 1] + np.sqrt(1 - memory**2) * base[:, t]
    # For a stretch of text the other model would rather say something else: the four likeliest tokens lose or gain
    # together, and whatever is sampled errs in one direction.
    drift = rng.standard_normal((group.max() + 1, longest, 1))
    for t in range(1, longest):
        drift[:, t] = 0.9 * drift[:, t - 1] + np.sqrt(1 - 0.9**2) * drift[:, t]
    likely = z >= np.sort(z, -1)[..., -4:-3]
    base = base[group] + 2 * drift[group] * likely
    if fault == "weights-growing":
        return base * strength * (step / step.max())[:, None, None]
    if fault == "cache":
        return base * strength * (group % 2)[:, None, None]
    if fault == "prompt":
        # Few tokens decide under the prompt's influence; it fades as the response becomes its own context.
        fade = 0.4 + 0.6 / np.sqrt(1 + np.arange(longest) / 2)
        decisive = np.repeat(rng.random((group.max() + 1, longest)) < 0.15, 2, 0)
        return base * strength * fade[None, :, None] * np.where(decisive, 2.0, 0.25)[..., None]
    return base * strength


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


def from_dump(rng: np.random.Generator, path: str) -> dict:
    """A random half of a healthy dump, by group."""
    table = pq.read_table(path)
    group = table["group"].to_numpy()
    chosen = np.flatnonzero(np.isin(group, rng.permutation(np.unique(group))[: len(np.unique(group)) // 2]))
    table = table.take(chosen)
    lists = lambda name: [np.array(row, np.float32) for row in table[name].to_pylist()]  # noqa: E731
    return {
        "sampler": lists("sampler_logprobs"),
        "learner": lists("learner_logprobs"),
        "ids": [np.array(row) for row in table["response_ids"].to_pylist()],
        "group": table["group"].to_numpy(),
        "step": table["step"].to_numpy(),
        "temperature": table["temperature"].to_numpy(),
        "engine": table["engine"][0].as_py(),
    }


def inject(rng: np.random.Generator, data: dict, fault: str, strength: float) -> None:
    """Faults of values and positions, in place."""
    mu, pi, ids = data["sampler"], data["learner"], data["ids"]
    for i in range(len(mu)):
        n = len(mu[i])
        if fault == "misaligned" and i < max(4, strength * len(mu)):
            mu[i] = np.roll(mu[i], 1)
        elif fault == "placeholder-eos":
            mu[i][-1] = strength
        elif fault == "placeholder-scattered":
            mu[i][rng.random(n) < strength] = 0.0
        elif fault == "missing":
            mu[i][rng.random(n) < strength] = np.nan
        elif fault == "observation":
            at, count = int(rng.integers(n // 4, n)), int(strength)
            spoken = -rng.gamma(1.5, 3.0, count).astype(np.float32)
            mu[i] = np.insert(mu[i], at, np.zeros(count, np.float32))
            pi[i] = np.insert(pi[i], at, spoken)
            ids[i] = np.insert(ids[i], at, rng.integers(0, VOCABULARY, count))
        elif fault == "retokenised" and i < strength * len(mu):
            # Text cut into more tokens: the learner's series gains values here and there, and drifts away.
            places = np.arange(4, n) if n > 5 else np.arange(1)
            for at in np.sort(rng.choice(places, min(len(places), max(1, n // 24)), replace=False))[::-1]:
                pi[i] = np.insert(pi[i], at, -rng.gamma(4.0, 3.0, 1).astype(np.float32))
            pi[i] = pi[i][:n]


def write(data: dict, path: Path) -> None:
    nullable = lambda rows: [[None if np.isnan(v) else float(v) for v in row] for row in rows]  # noqa: E731
    count = len(data["ids"])
    columns = {
        "response_ids": pa.array([row.tolist() for row in data["ids"]], pa.list_(pa.int32())),
        "sampler_logprobs": pa.array(nullable(data["sampler"]), pa.list_(pa.float32())),
        "learner_logprobs": pa.array(nullable(data["learner"]), pa.list_(pa.float32())),
        "group": pa.array(data["group"], pa.int32()),
        "step": pa.array(data["step"], pa.int32()),
        "temperature": pa.array(data["temperature"], pa.float32()),
        "engine": pa.array([data["engine"]] * count),
    }
    pq.write_table(pa.table(columns), path)


def expected(fault: str) -> str:
    if fault.startswith("truncated"):
        return "truncated-support"
    return next((name for name in ("temperature", "placeholder", "weights") if fault.startswith(name)), fault)


def named(verdict: dict) -> str:
    causes = [cause["cause"] for cause in verdict["causes"] if cause["cause"] not in ("precision", "quantised")]
    return causes[0] if causes else "healthy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--dumps", help="folder with healthy-*.parquet")
    parser.add_argument("--only", help="faults whose names start so")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    healthy = sorted(glob.glob(f"{arguments.dumps}/healthy-*.parquet")) if arguments.dumps else []
    plan = [("healthy", 0.0)] + [(fault, s) for fault, strengths in STRENGTHS.items() for s in strengths]
    with tempfile.TemporaryDirectory() as folder:
        for source in ["synthetic", *healthy]:
            for fault, strength in plan:
                if source != "synthetic" and fault not in ON_DUMPS:
                    continue
                if arguments.only and not fault.startswith(arguments.only):
                    continue
                counts: collections.Counter = collections.Counter()
                for draw in range(arguments.draws):
                    rng = np.random.default_rng([arguments.seed, draw, len(fault), int(100 * strength) + 1000])
                    engine = ("bf16", "int8")[draw % 2]
                    data = generate(rng, fault, strength, engine) if source == "synthetic" else from_dump(rng, source)
                    inject(rng, data, fault, strength)
                    path = Path(folder) / "dump.parquet"
                    write(data, path)
                    counts[named(explain([str(path)]))] += 1
                right = counts[expected(fault)]
                place = Path(source).stem
                print(
                    f"{place:18} {fault:22} {strength:6g}  {right / arguments.draws:5.0%}  {dict(counts)}", flush=True
                )


if __name__ == "__main__":
    main()
