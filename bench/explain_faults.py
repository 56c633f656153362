"""Faulty dumps from the bank of bench/explain_bank.py, in memory: a random part of a run, with one fault."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from explain_synthetic import generate

from trueup.explain.dump import Batch
from trueup.explain.sample import Sample, Sampler, log_odds

PROMPT = {
    "weak": ("double-bos", "newline", "dated-system"),
    "middle": ("other-system", "no-system", "padded", "other-instruction", "no-instruction"),
    "strong": ("raw", "few-shot", "no-system-instruction", "no-generation", "cut-left", "swapped"),
}
WEIGHTS = {
    "weak": ("rl2-half", "sft1-third", "layer1", "sft1", "embedding"),
    "middle": ("sft2", "attention-lora", "rl4-quarter", "layers4", "head", "layers12", "mlp-lora"),
    "strong": ("sft4", "sft8", "mlp", "rl4", "bias-missing"),
}
DEVELOPMENT = {
    "newline", "other-system", "padded", "no-instruction", "few-shot", "no-generation", "swapped",
    "rl2-half", "layer1", "sft2", "head", "layers12", "sft8", "stale-sft2", "mlp", "retok-24", "cache-sft2",
}  # fmt: skip
GROWING = {
    "weak": ("healthy", "sft1-third", "sft1-third", "sft1"),
    "middle": ("healthy", "sft1", "sft2", "sft4"),
    "strong": ("healthy", "sft2", "sft4", "sft8"),
}
BEHIND = {"weak": ("sft1-third", "sft1"), "middle": ("sft1", "sft2"), "strong": ("sft2", "sft4")}


@dataclass(frozen=True)
class Bank:
    folder: Path
    part: str

    @functools.cache  # noqa: B019
    def load(self, kind: str) -> dict:
        table = pq.read_table(self.folder / f"{kind}.parquet")
        flat = lambda name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)  # noqa: E731
        return {
            "lengths": table["response_ids"].combine_chunks().value_lengths().to_numpy().astype(np.int64),
            "mu": flat("sampler_logprobs").astype(np.float32),
            "pi": flat("learner_logprobs").astype(np.float32),
            "ids": flat("response_ids").astype(np.int32),
            "group": table["group"].to_numpy().astype(float),
            "step": np.zeros(table.num_rows),
            "temperature": table["temperature"].to_numpy().astype(float),
            "engine": table["engine"][0].as_py(),
        }

    @functools.cache  # noqa: B019
    def variant(self, kind: str, name: str) -> np.ndarray:
        return self.load(kind)["pi"] if name == "healthy" else np.load(self.folder / f"{kind}.{name}.npy")

    def has(self, kind: str, name: str) -> bool:
        return name == "healthy" or (self.folder / f"{kind}.{name}.npy").exists()

    def names(self, names, kind: str) -> list[str]:
        """Those of a list of variants that were scored and belong to the part."""
        wanted = {"dev": True, "held": False}.get(self.part)
        return [n for n in names if self.has(kind, n) and (wanted is None or (n in DEVELOPMENT) == wanted)]

    def runs(self, names) -> list[str]:
        wanted = {"dev": True, "held": False}.get(self.part)
        there = [n for n in names if (self.folder / f"{n}.parquet").exists()]
        return [n for n in there if wanted is None or not n.startswith("cache") or (n in DEVELOPMENT) == wanted]

    def groups(self, rng, kind: str, prompts: int) -> np.ndarray:
        groups = np.unique(self.load(kind)["group"])
        half = len(groups) // 2
        groups = {"dev": groups[:half], "held": groups[half:]}.get(self.part, groups)
        return rng.permutation(groups)[: min(prompts, 3 * len(groups) // 4)]


def draw(bank: Bank, rng, kind: str, prompts: int) -> dict:
    """A random part of a run, by prompt; `at` are its tokens in the run's arrays."""
    run = bank.load(kind)
    rows = np.flatnonzero(np.isin(run["group"], bank.groups(rng, kind, prompts)))
    starts = np.cumsum(run["lengths"]) - run["lengths"]
    at = np.concatenate([np.arange(starts[r], starts[r] + run["lengths"][r]) for r in rows])
    data = {name: run[name][at].copy() for name in ("mu", "pi", "ids")}
    data |= {name: run[name][rows].copy() for name in ("lengths", "group", "step", "temperature")}
    return data | {"engine": run["engine"], "at": at, "kind": kind}


def quantise(bank: Bank, rng, data: dict) -> None:
    """Adds the noise of real int8 rollouts to the sampler's log-odds, drawn among tokens of about the same odds."""
    run = bank.load("int8")
    gap, odds = log_odds(run["pi"]) - log_odds(run["mu"]), (log_odds(run["pi"]) + log_odds(run["mu"])) / 2
    order = np.argsort(odds)
    at = np.searchsorted(odds[order], log_odds(data["mu"])) + rng.integers(-30, 31, len(data["mu"]))
    moved = log_odds(data["mu"]) - gap[order][np.clip(at, 0, len(gap) - 1)]
    data["mu"], data["engine"] = (-np.logaddexp(0, -moved)).astype(np.float32), "vllm:int8"


def rows_of(data: dict) -> np.ndarray:
    return np.repeat(np.arange(len(data["lengths"])), data["lengths"])


def to_sample(data: dict) -> Sample:
    count = len(data["lengths"])
    batch = Batch(
        offsets=np.concatenate([[0], np.cumsum(data["lengths"])]),
        sampler_N=data["mu"].astype(np.float32),
        learner_N=data["pi"].astype(np.float32),
        mask_N=np.ones(len(data["mu"]), bool),
        unequal_B=np.zeros(count, bool),
        row_B=np.arange(count),
        columns={name: data[name] for name in ("step", "group", "temperature")}
        | {"lag": np.full(count, np.nan), "learner_version": np.full(count, -1.0)},
        ids_N=data["ids"],
        engine=data["engine"],
    )
    sampler = Sampler()
    sampler.add(batch)
    return sampler.sample()


# --- faults ---------------------------------------------------------------------------------------------------------


def rescore(bank: Bank, data: dict, name: str, rows: np.ndarray | None = None) -> None:
    """The learner's log-probs become those of a variant, in all rows or in some."""
    other = bank.variant(data["kind"], name)[data["at"]]
    hit = np.ones(len(other), bool) if rows is None else np.isin(rows_of(data), rows)
    data["pi"] = np.where(hit, other, data["pi"])


def some_rows(rng, data: dict, fraction: float, by_prompt: bool) -> np.ndarray:
    if not by_prompt:
        count = max(1, round(fraction * len(data["lengths"])))
        return rng.permutation(len(data["lengths"]))[:count]
    groups = np.unique(data["group"])
    chosen = rng.permutation(groups)[: max(1, round(fraction * len(groups)))]
    return np.flatnonzero(np.isin(data["group"], chosen))


def in_steps(rng, data: dict, count: int) -> None:
    """Prompts spread over `count` steps."""
    _, at = np.unique(data["group"], return_inverse=True)
    data["step"] = (rng.permutation(at.max() + 1) % count)[at].astype(float)


def alone(data: dict) -> dict:
    """One response a prompt, and no prompt known."""
    first = np.unique(data["group"], return_index=True)[1]
    kept_N = np.isin(rows_of(data), first)
    return (
        data
        | {name: data[name][kept_N] for name in ("mu", "pi", "ids", "at")}
        | {name: data[name][first] for name in ("lengths", "step", "temperature")}
        | {"group": np.full(len(first), -1.0)}
    )


def shift(rng, data: dict, fraction: float) -> None:
    ends = np.cumsum(data["lengths"])
    for row in some_rows(rng, data, fraction, by_prompt=False):
        part = slice(ends[row] - data["lengths"][row], ends[row])
        data["mu"][part] = np.roll(data["mu"][part], 1)


def speak(bank: Bank, rng, data: dict, count: int, text: str) -> None:
    """Text that was not sampled inside each response: log-prob 0 for the sampler, the learner's opinion of such text.

    text: `tool`, what tools print; `swapped`, responses to other questions, which is as plausible as foreign text gets.
    """
    foreign = bank.variant("bf16", text)
    ends = np.cumsum(data["lengths"])
    places, spoken = [], []
    for row in range(len(ends)):
        place = ends[row] - int(rng.integers(1, max(2, 3 * data["lengths"][row] // 4)))
        begin = int(rng.integers(0, len(foreign) - count))
        places += [place] * count
        spoken.append(foreign[begin : begin + count])
    data["mu"] = np.insert(data["mu"], places, 0.0)
    data["pi"] = np.insert(data["pi"], places, np.concatenate(spoken))
    data["ids"] = np.insert(data["ids"], places, rng.integers(0, 50_000, len(places)))
    data["lengths"] = data["lengths"] + count


NOISED = "bf16 with int8 noise"
HEALTHY = ("bf16", "int8", "t06", "t13", "t09", "t12", NOISED)
VALUES = ("bf16", "int8", "t06")
"""Runs that injected values and positions go into."""


def faulty(bank: Bank, rng, fault: str, strength, number: int, prompts: int) -> dict | None:
    """One dump with the fault; None where the bank lacks it."""
    pick = lambda names: names[number % len(names)] if names else None  # noqa: E731
    if fault.startswith("synthetic-"):
        return generate(rng, fault.removeprefix("synthetic-"), strength, ("bf16", "int8")[number % 2], prompts)
    if fault.endswith("-single") and not fault.startswith("healthy"):
        data = faulty(bank, rng, fault.removesuffix("-single"), strength, number, prompts)
        return data and alone(data)
    if fault == "retokenised":
        kind = pick([kind for kind in (*VALUES, NOISED) if bank.has(kind.split()[0], "retok-24")])
    elif fault in ("weights", "prompt", "weights-replicas", "weights-growing", "weights-behind"):
        kind = strength[1]
    elif fault == "stale":
        kind = "bf16"
    elif fault.startswith(("truncated", "cache", "healthy", "temperature")):  # the strength is the run
        kind = strength if strength == NOISED else pick(bank.runs((strength,)))
    else:
        kind = pick(VALUES)
    noised, kind = kind == NOISED, "bf16" if kind == NOISED else kind
    if kind is None or not (bank.folder / f"{kind}.parquet").exists():
        return None
    data = draw(bank, rng, kind, min(prompts, 8) if fault == "healthy-few" else prompts)
    if fault == "healthy-steps":
        in_steps(rng, data, 8)
    elif fault == "healthy-single":
        data = alone(data)
    elif fault in ("prompt", "weights", "weights-replicas"):
        names = bank.names((PROMPT if fault == "prompt" else WEIGHTS)[strength[0]], kind)
        if not names:
            return None
        some = some_rows(rng, data, 0.5, by_prompt=False) if fault.endswith("replicas") else None
        rescore(bank, data, pick(names), some)
    elif fault == "weights-growing":
        in_steps(rng, data, 4)
        for step, name in enumerate(GROWING[strength[0]]):
            if not bank.has(kind, name):
                return None
            rescore(bank, data, name, np.flatnonzero(data["step"] == step))
    elif fault == "weights-behind":  # two versions behind, from the third step on
        in_steps(rng, data, 8)
        for step in range(8):
            name = ("healthy", *BEHIND[strength[0]])[min(step, 2)]
            if not bank.has(kind, name):
                return None
            rescore(bank, data, name, np.flatnonzero(data["step"] == step))
    elif fault == "stale":
        if not bank.has("bf16", strength):
            return None
        rescore(bank, data, strength, some_rows(rng, data, 0.5, by_prompt=True))
    elif fault == "temperature-raw":
        data["mu"] = bank.variant(kind, "raw-sampler")[data["at"]]
    elif fault == "temperature-learner":
        data["pi"], data["temperature"] = bank.variant(kind, "raw-sampler")[data["at"]], np.ones(len(data["lengths"]))
    elif fault == "misaligned":
        shift(rng, data, strength)
    elif fault == "placeholder-end":
        data["mu"][np.cumsum(data["lengths"]) - 1] = strength
    elif fault == "placeholder-scattered":
        data["mu"][rng.random(len(data["mu"])) < strength] = 0.0
    elif fault == "missing":
        data["mu"][rng.random(len(data["mu"])) < strength] = np.nan
    elif fault.startswith("observation"):
        text = "swapped" if fault.endswith("plausible") else "tool"
        if not bank.has("bf16", text):
            return None
        speak(bank, rng, data, strength, text)
    elif fault == "retokenised":
        names = bank.names(("retok-24", "retok-words", "retok-8"), kind)
        if not names:
            return None
        rescore(bank, data, pick(names), some_rows(rng, data, strength, by_prompt=number % 2 == 0))
    elif fault.startswith("both-"):
        return both(bank, rng, fault, number, prompts)
    if noised:
        quantise(bank, rng, data)
    return data


def both(bank: Bank, rng, fault: str, number: int, prompts: int) -> dict | None:
    """Two faults in different responses or steps: other weights in half of the prompts; in the other half a temperature, or
    a truncation, from the generator where the bank has no such run."""
    first_kind = "t06" if "temperature" in fault else ("topp80", "minp05", "topp95")[number % 3]
    if (bank.folder / f"{first_kind}.parquet").exists():
        first = draw(bank, rng, first_kind, prompts // 2)
    else:
        kind, strength = (("top-p", 0.8), ("min-p", 0.05), ("top-p", 0.9))[number % 3]
        first = generate(rng, f"truncated-{kind}", strength, "bf16", prompts // 2)
    if first_kind == "t06":
        first["mu"] = bank.variant("t06", "raw-sampler")[first["at"]]
    names = bank.names(WEIGHTS["strong"], "bf16")
    if not names:
        return None
    second = draw(bank, rng, "bf16", prompts // 2)
    rescore(bank, second, names[number % len(names)])
    second["group"] = second["group"] + 1000
    if "steps" in fault:
        second["step"] = second["step"] + 1
    if first_kind == "t06":  # one believed temperature, so that the column does not give the answer away
        second["temperature"] = second["temperature"] * 0 + 0.6
    return {
        name: np.concatenate([first[name], second[name]])
        for name in ("lengths", "mu", "pi", "ids", "group", "step", "temperature")
    } | {"engine": "vllm:bf16"}
