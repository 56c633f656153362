"""The verb `trueup eval`: its options, and what it prints and writes. Imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

SETTINGS = ("limit", "samples", "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "null", "batch")
EXAMPLE = (
    "trueup eval MODEL --task gsm8k:data/gsm8k --engine transformers:bf16 --engine vllm:int8 --limit 200; "
    "results made elsewhere: trueup eval compare samples_a.jsonl samples_b.jsonl"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "what",
        nargs="+",
        metavar="MODEL",
        help="folder, hub name, or mini; or: compare A B ..., files or folders of results",
    )
    add("--task", help="sums, gsm8k:PATH, jsonl:PATH, choice:PATH (log-likelihood of given choices), ...")
    add("--engine", action="append", default=[], metavar="SPEC", help="engine:precision; repeatable")
    add("--limit", type=int, metavar="N", help="ask the first N problems (default: all)")
    add("--samples", type=int, default=1, metavar="K", help="answers a problem (default: 1)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=-1)
    add("--min-p", type=float, default=0.0)
    add("--max-tokens", type=int, default=512, metavar="N", help="longest response, tokens (default: 512)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a response, besides the stop ids; repeatable")
    add("--seed", type=int, default=0)
    add("--null", choices=("first", "each", "none"), default="first", help="engines that run again, in other batches")
    add("--batch", type=int, metavar="N", help="problems handed over together (default: 64, on a GPU 512)")
    add(
        "--out",
        metavar="DIR",
        help="results and report.html; what is there is not asked again (default: runs/eval-...)",
    )
    add("--metric", help="compare: which score of a harness's file counts")
    add("--filter", help="compare: which of lm-eval's filters")
    add("--common", action="store_true", help="compare: only the problems that all have")
    add("--tokenizer", metavar="DIR", help="compare: shows as text how prompts differ")


def evaluate_command(arguments: argparse.Namespace) -> int:
    model, *files = arguments.what
    if model == "compare":
        if arguments.engine or arguments.task or not files:
            raise ValueError(
                "compare takes files or folders of results, no --task and no --engine: trueup eval compare A B"
            )
        from trueup.evaluate.compare import read_all

        return _show(arguments, read_all(files, metric=arguments.metric, filter=arguments.filter), arguments.out)
    if files:
        raise ValueError(f"one model at a time; found {' '.join(arguments.what)}")
    if not arguments.task or not arguments.engine:
        raise ValueError("give --task and at least one --engine: trueup eval mini --task sums --engine vllm:bf16")
    from trueup.evaluate.progress import progress_bar
    from trueup.evaluate.run import evaluate_model

    out = Path(arguments.out or Path("runs") / f"eval-{Path(model).name}-{arguments.task.partition(':')[0]}")
    chosen = {name: getattr(arguments, name) for name in SETTINGS}
    with progress_bar() as progress:
        evaluations = evaluate_model(model, arguments.task, arguments.engine, out, progress=progress, **chosen)
    return _show(arguments, evaluations, out)


def _show(arguments: argparse.Namespace, evaluations: Sequence, out: str | Path | None) -> int:
    from trueup.evaluate.compare import compare
    from trueup.evaluate.text import print_comparison
    from trueup.evaluate.why import decoder, print_why, why, write_page

    result = compare(evaluations, common=arguments.common)
    found = why(evaluations, decoder(evaluations, arguments.tokenizer))
    summary = result | {"why": found.to_json()}
    if out is not None:
        summary["report"] = str(write_page(Path(out) / "report.html", evaluations, result, found))
        (Path(out) / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(summary))
        return 0
    print_comparison(result)
    print_why(found)
    if out is not None:
        print(f"wrote {summary['report']}")
    return 0
