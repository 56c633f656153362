"""`trueup measure`: where the gap of a live model comes from, one engine after another.

On disk: NAME.json with every ladder, and the rollouts it was climbed on beside it, NAME.parquet for one sampler or
NAME-vllm-int8.parquet, ... for several. One file a sampler, because two engines in one dump look like replicas of which one
has other weights. `trueup report` finds either from the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trueup.explain.ladder import Ladder, climb, context, text_around
from trueup.learner.model import Policy, load_causal_lm, load_tokenizer, resolve, stop_token_ids
from trueup.rollouts import Rollouts
from trueup.samplers import Sampling, open_sampler, parse_spec, require_vllm
from trueup.sync import load_once
from trueup.tasks import load_task
from trueup.tasks.prompts import encode_prompt

SCHEMA, KIND = 1, "measure"


@dataclass(frozen=True)
class Measured:
    """One sampler's ladder, with the rollouts it was climbed on."""

    spec: str
    ladder: Ladder
    rollouts: Rollouts

    def to_json(self, tokenizer) -> dict:
        found = {"spec": self.spec} | asdict(self.ladder)
        for token in found["largest"]:
            token["text"] = text_around(token, self.rollouts, tokenizer)
            token["context"] = context(token, self.rollouts, tokenizer)
        return found


def measure_model(
    model: str,
    specs: Sequence[str],
    task: str,
    *,
    prompts: int = 32,
    samples: int = 2,
    max_tokens: int = 128,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Sample held-out problems of `task` with each engine at temperature 1 and climb the ladder; one engine in memory at a
    time. Raises ValueError for an engine that does not exist before anything runs."""
    for spec in specs:
        if parse_spec(spec)[0] == "vllm":
            require_vllm()
    tokenizer = load_tokenizer(model)
    learner = Policy(load_causal_lm(model, "bf16"))
    problems = load_task(task, seed=seed, heldout=prompts).heldout[:prompts]
    asked = [encode_prompt(problem, tokenizer) for problem in problems]
    sampling = Sampling(
        max_tokens=max_tokens, stop_token_ids=stop_token_ids(tokenizer, learner.model), n=samples, seed=seed
    )
    measured = []
    for spec in specs:
        say(f"{spec}: starting")
        longest = max(map(len, asked)) + max_tokens
        sampler = open_sampler(spec, resolve(model), context=longest)
        load_once(learner, sampler, asked, sampling, longest)
        say(f"{spec}: sampling {len(asked)} prompts x {samples}")
        rollouts = sampler.generate(asked, sampling)
        say(f"{spec}: scoring {rollouts.tokens} tokens on every rung")
        ladder = climb(model, sampler, rollouts)
        rollouts.learner_version[:] = 0
        measured.append(Measured(spec, ladder, rollouts))
        sampler.close()
    return measured


def measured_json(model: str, task: str, measured: Sequence[Measured], tokenizer) -> dict:
    """What `trueup measure --json` prints and `--out` writes."""
    ladders = [found.to_json(tokenizer) for found in measured]
    return {"schema": SCHEMA, "kind": KIND, "model": model, "task": task, "learner": "bf16", "samplers": ladders}


def write_measured(found: dict, measured: Sequence[Measured], path: str | Path) -> list[Path]:
    """The ladders of `measured_json` as JSON and the rollouts as parquet beside it; `path` is a name with or without
    `.json` or `.parquet`, or a folder (say, a run) where they are called `measure`. Returns what was written."""
    path = Path(path)
    path = path / "measure" if path.is_dir() else path
    if path.suffix in (".json", ".parquet"):
        path = path.with_suffix("")
    path.parent.mkdir(parents=True, exist_ok=True)
    written, samplers = [], []
    for one, ladder in zip(measured, found["samplers"], strict=True):
        name = path.name + (f"-{one.spec.replace(':', '-')}" if len(measured) > 1 else "") + ".parquet"
        one.rollouts.to_parquet(path.with_name(name))
        written.append(path.with_name(name))
        samplers.append({**ladder, "dump": name})
    json_path = path.with_name(path.name + ".json")
    temporary = path.with_name(path.name + ".json.tmp")
    temporary.write_text(json.dumps(found | {"samplers": samplers}) + "\n", encoding="utf-8")
    os.replace(temporary, json_path)
    return [json_path, *written]


def print_ladders(measured: Sequence[Measured], tokenizer, console: Console) -> None:
    for found in measured:
        ladder, stats = found.ladder, found.ladder.stats
        low, high = stats["mismatch/rho_mean_low"], stats["mismatch/rho_mean_high"]
        console.print(
            f"\n{found.spec} against the bf16 learner: {ladder.tokens:,} tokens, KL k1 {stats['mismatch/kl_k1']:.1e}, "
            f"k3 {stats['mismatch/kl_k3']:.1e}, mean |pi-mu| {stats['mismatch/prob_diff_mean']:.4f}, "
            f"max {stats['mismatch/prob_diff_max']:.2f}, E[rho] {low:.3f} to {high:.3f}, "
            f"another argmax at {ladder.argmax_differs:.1%}",
            markup=False,
            soft_wrap=True,
        )
        console.print(_table(ladder))
        slope = ladder.growth
        growth = ", ".join(f"{_positions(part)}: {part['log_rho_abs_mean']:.4f}" for part in ladder.by_position)
        console.print(f"mean |log rho| by position: {growth}", markup=False, soft_wrap=True)
        console.print(
            f"  a doubling of the position adds {slope['per_doubling']:+.4f} ({slope['low']:+.4f} to {slope['high']:+.4f}) nats",
            markup=False,
            soft_wrap=True,
        )
        for token in ladder.largest[:4]:
            text = text_around(token, found.rollouts, tokenizer)
            console.print(
                f"  |pi-mu| {token['prob_diff']:.2f}, mostly {token['step']}, at {text!r}", markup=False, soft_wrap=True
            )


def _table(ladder: Ladder) -> Table:
    table = Table("step", "share of gap", "95%", "k1", "rms log rho")
    for column in table.columns:
        column.no_wrap = True
    for step in ladder.steps:
        interval = _percents(step.share_low, step.share_high)
        table.add_row(step.cause, f"{step.share:.0%}", interval, f"{step.k1:+.1e}", f"{step.rms:.4f}")
    table.add_section()
    total, k1 = sum(step.share for step in ladder.steps), ladder.stats["mismatch/kl_k1"]
    table.add_row("sum", f"{total:.0%}", "", f"{k1:+.1e}", "")
    interval = _percents(ladder.null_low, ladder.null_high)
    table.add_row("null: other batch", f"{ladder.null_share:.0%}", interval, "", f"{ladder.null_rms:.4f}")
    if ladder.rounding_share is not None:
        interval = _percents(ladder.rounding_low, ladder.rounding_high)
        table.add_row("null of kernels in int8", f"{ladder.rounding_share:.0%}", interval, "", "")
    return table


def _positions(part: dict) -> str:
    """Counted from 1, as people count."""
    first, last = part["from"] + 1, part["to"]
    return f"{first}" if first == last else f"{first}-{last}"


def _percents(low: float, high: float) -> str:
    return f"{low:.0%} to {high:.0%}"
