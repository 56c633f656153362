"""`trueup measure`: where the gap of a live model comes from, one engine after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trueup.explain.ladder import Ladder, climb, text_around
from trueup.learner.model import Policy, load_causal_lm, load_tokenizer, resolve, stop_token_ids
from trueup.rollouts import Rollouts
from trueup.samplers import Sampling, open_sampler, parse_spec, require_vllm
from trueup.tasks import load_task
from trueup.tasks.prompts import encode_prompt


@dataclass(frozen=True)
class Measured:
    """One sampler's ladder, with the rollouts it was climbed on."""

    spec: str
    ladder: Ladder
    rollouts: Rollouts

    def to_json(self, tokenizer) -> dict:
        found = asdict(self.ladder) | {"spec": self.spec}
        for token in found["largest"]:
            token["text"] = text_around(token, self.rollouts, tokenizer)
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
        sampler = open_sampler(spec, resolve(model), context=max(map(len, asked)) + max_tokens)
        sampler.load(learner.weights(), 0)
        say(f"{spec}: sampling {len(asked)} prompts x {samples}")
        rollouts = sampler.generate(asked, sampling)
        say(f"{spec}: scoring {rollouts.tokens} tokens on every rung")
        ladder = climb(model, sampler, rollouts)
        rollouts.learner_logprobs, _ = learner.score(rollouts)
        rollouts.learner_version[:] = 0
        measured.append(Measured(spec, ladder, rollouts))
        sampler.close()
    return measured


def write_dump(measured: Sequence[Measured], path: str | Path) -> None:
    """The rollouts of all samplers in one parquet file, for `trueup explain` and `trueup report`."""
    Rollouts.concat([found.rollouts for found in measured]).to_parquet(path)


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
        table = Table("step", "share of gap", "95%", "k1", "rms log rho")
        for column in table.columns:
            column.no_wrap = True
        for step in ladder.steps:
            interval = f"{step.share_low:.0%} to {step.share_high:.0%}"
            table.add_row(step.cause, f"{step.share:.0%}", interval, f"{step.k1:+.1e}", f"{step.rms:.4f}")
        table.add_section()
        table.add_row(
            "sum", f"{sum(step.share for step in ladder.steps):.0%}", "", f"{stats['mismatch/kl_k1']:+.1e}", ""
        )
        table.add_row("null: other batch", f"{ladder.null_share:.0%}", "", "", f"{ladder.null_rms:.4f}")
        console.print(table)
        growth = ", ".join(
            f"{part['from']}-{part['to']}: {part['log_rho_abs_mean']:.4f}" for part in ladder.by_position
        )
        console.print(f"mean |log rho| by position: {growth}", markup=False, soft_wrap=True)
        for token in ladder.largest[:4]:
            text = text_around(token, found.rollouts, tokenizer)
            console.print(f"  |pi-mu| {token['prob_diff']:.2f} at {text!r}", markup=False, soft_wrap=True)
