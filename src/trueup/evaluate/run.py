"""`trueup eval`: one task through several engines, one in memory at a time; a killed evaluation continues where it was."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trueup.evaluate.engines import Run, collect
from trueup.evaluate.plan import (
    PLAN,
    Asked,
    Plan,
    model_sha256,
    problems_of,
    sampling_defaults,
    sha256_of,
    template_sha256,
    tokenizer_sha256,
)
from trueup.evaluate.records import Evaluation
from trueup.samplers.base import EngineError, parse_spec

NULLS = ("first", "each", "none")


class Progress(NamedTuple):
    """Where the evaluation is."""

    engine: str
    done: int
    """Answers of all engines."""
    total: int
    tokens_per_second: float | None
    """Of this engine so far."""


def evaluate_model(
    model: str,
    task: str,
    engines: Sequence[str],
    out: str | Path,
    *,
    limit: int | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = -1,
    min_p: float = 0.0,
    max_tokens: int = 512,
    stop: Sequence[str] = (),
    seed: int = 0,
    null: str = "first",
    batch: int | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Evaluation]:
    """Ask `engines` the same prompts, token for token, under the same settings; one Evaluation an engine, with the null
    beside its engine.

    Args:
        out: folder of the results; one that holds a part of the same evaluation is completed.
        limit: the first so many problems. samples: answers a problem, K.
        temperature: 0 is greedy. stop: texts that end a response, besides the end-of-text ids.
        null: which engines run twice, with other batches: `first`, `each` or `none`.
        batch: problems handed to an engine together; default 64 on CPU, 512 on a GPU.

    Raises ValueError or EngineError, with what to do, before any engine starts where that can be known.
    """
    runs = plan_runs(engines, null)
    plan, asked = make_plan(
        model, task, limit, samples, temperature, top_p, top_k, min_p, max_tokens, tuple(stop), seed, batch
    )
    out = Path(out)
    with _held(out):
        if (out / PLAN).exists():
            plan.check_same(out)
        else:
            asked.save(out)
            plan.save(out)
        return _evaluate(out, runs, plan, asked, progress)


def _evaluate(
    out: Path, runs: Sequence[Run], plan: Plan, asked: Asked, progress: Callable[[Progress], None]
) -> list[Evaluation]:
    total, done = len(runs) * len(asked) * plan.samples, 0
    evaluations = []
    for run in runs:
        chunks = run.chunks(plan, len(asked))
        missing = run.missing(out, plan, len(asked))
        done += (len(asked) - sum(len(chunks[chunk]) for chunk in missing)) * plan.samples
        progress(Progress(run.name, done, total, None))
        if missing:
            tokens = seconds = 0.0
            for report in _answers(out, run):
                done, tokens, seconds = done + report["answers"], tokens + report["tokens"], seconds + report["seconds"]
                progress(Progress(run.name, done, total, tokens / max(seconds, 1e-9)))
        evaluations.append(collect(out, run, plan, asked))
    return evaluations


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """One evaluation at a time in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another evaluation is at work in {folder}; wait for it, or give another --out") from None
        yield


def plan_runs(engines: Sequence[str], null: str) -> list[Run]:
    """Raises ValueError for an engine that does not exist, or that is named twice, before anything runs."""
    if null not in NULLS:
        raise ValueError(f"null={null!r}: expected {', '.join(NULLS)}")
    if not engines:
        raise ValueError("no engine is named; give one or more, such as transformers:bf16 and vllm:bf16")
    runs, specs = [], []
    for given in engines:
        spec = ":".join(parse_spec(given))
        if spec in specs:
            raise ValueError(f"engine {spec} is named twice; the null runs it a second time by itself (--null each)")
        if spec.startswith("vllm"):
            from trueup.samplers import require_vllm

            require_vllm()
        specs.append(spec)
        runs.append(Run(spec))
        if null == "each" or (null == "first" and len(specs) == 1):
            runs.append(Run(spec, again=True))
    return runs


def make_plan(
    model: str,
    task: str,
    limit: int | None,
    samples: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    max_tokens: int,
    stop: tuple[str, ...],
    seed: int,
    batch: int | None,
) -> tuple[Plan, Asked]:
    """Everything that every engine is told, and the problems as ids."""
    import torch
    from transformers import AutoModelForCausalLM

    from trueup.learner.model import load_tokenizer, model_config, resolve, stop_token_ids

    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves nothing to ask; give 1 or more problems, or leave it out")
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch}: give 1 or more problems")
    if samples > 1 and temperature == 0:
        raise ValueError(
            f"samples={samples} at temperature 0 would be {samples} times the same answer; "
            "give a temperature (--temperature 1), or one sample"
        )
    if "" in stop:
        raise ValueError("an empty stop string would end every response before it began; leave it out")
    config = model_config(model)
    known_task, problems = problems_of(task, seed, limit)
    tokenizer = load_tokenizer(model)
    asked = Asked.of(known_task, problems, tokenizer)
    kind = "choice" if hasattr(known_task, "encode") else "generate"
    if kind == "choice" and samples > 1:
        raise ValueError(f"samples={samples}: choices are scored, not sampled; leave --samples out")
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    shell.generation_config = _generation_config(resolve(model)) or shell.generation_config
    plan = Plan(
        model=model,
        task=task,
        limit=limit,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        stop=stop,
        seed=seed,
        batch=batch or (512 if torch.cuda.is_available() else 64),
        stop_token_ids=stop_token_ids(tokenizer, shell),
        bos_token_id=tokenizer.bos_token_id,
        kind=kind,
        prompts_sha256=sha256_of(asked.prompts),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        chat_template_sha256=template_sha256(tokenizer),
        model_sha256=model_sha256(resolve(model)),
        generation_config=sampling_defaults(resolve(model)),
    )
    plan.sampling(0)  # its own checks, before an engine starts
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, asked.prompts))
    if kind == "generate" and room and longest + max_tokens > room:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with max_tokens={max_tokens} that is more than the {room} "
            "positions of the model: ask for fewer tokens"
        )
    return plan, asked


def _generation_config(model: str):
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        return None


def _answers(out: Path, run: Run) -> Iterator[dict]:
    """The engine's process, from start to end; yields its report of every chunk."""
    log = out / f"{run.stem}.log"
    command = [sys.executable, "-m", "trueup.evaluate.engines", str(out), run.spec, "again" if run.again else "first"]
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        try:
            for line in process.stdout:
                report = json.loads(line)
                if "error" in report:
                    raise EngineError(f"{run.spec}: {report['error']}")
                yield report
            if process.wait() != 0:
                raise EngineError(
                    f"the process of {run.spec} ended with status {process.returncode}; the end of {log}:\n{_tail(log)}"
                )
        finally:
            process.kill()  # no engine may stay in memory when the next one starts
            process.wait()
            process.stdin.close()
            process.stdout.close()
    log.unlink()


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
