"""The command line: one short function a verb; parsing only. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 success, 1 a gate the user asked for failed, 2 bad input."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes overrides only next to CONFIG; people also write them after the options.
    if rest and (not hasattr(arguments, "overrides") or any("=" not in word or word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported; a note on NUMA at every start
    try:
        return arguments.verb(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except _bad_input() as error:
        if os.environ.get("TRUEUP_TRACEBACK"):
            raise
        print(f"trueup: {error}", file=sys.stderr)
        if type(error) is ValueError:
            print("(TRUEUP_TRACEBACK=1 shows where this was found)", file=sys.stderr)
        return 2


def _bad_input() -> tuple[type[Exception], ...]:
    """Errors whose message already says what to do; anything else is a fault of ours and shows its traceback."""
    expected: list[type[Exception]] = [FileNotFoundError, ValueError, OSError]
    for module, name in (
        ("trueup.samplers.base", "EngineError"),
        ("trueup.rundir", "RunDirectoryError"),
        ("trueup.sync", "DeliveryError"),
    ):
        if module in sys.modules:
            expected.append(getattr(sys.modules[module], name))
    return tuple(expected)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trueup", description="RL on rollouts of fast engines, kept honest.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    train = _verb(
        verbs,
        _train,
        "train",
        "train a model by RL",
        "trueup train configs/sums-ppo-int8-tis.yaml sampler.precision=bf16 correction=none seed=1 --out runs/first",
    )
    train.add_argument("config", nargs="?", help="YAML file; without it every field has its default")
    train.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides, e.g. sampler.precision=int8"
    )
    train.add_argument("--out", help="run directory (default: runs/<config's name>, numbered if taken)")
    train.add_argument("--resume", action="store_true", help="continue the run in --out from its newest checkpoint")
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")

    explain = _verb(
        verbs,
        _explain,
        "explain",
        "name the causes of the gap in rollout dumps",
        "trueup explain runs/first/rollouts/*.parquet --gate 'kl<0.01' --gate 'ess>0.5'",
    )
    explain.add_argument(
        "dumps", nargs="+", metavar="DUMP", help="parquet, JSONL or slime's .pt files, folders or globs"
    )
    explain.add_argument(
        "--columns",
        help="OURS=THEIRS,... or a format (trl, verl, prime-rl, slime, nemo-rl); found by itself where it can be",
    )
    explain.add_argument("--tokenizer", metavar="MODEL", help="prove re-tokenisation with this tokenizer")
    explain.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit 1 unless it holds, e.g. 'kl<0.01'; repeatable",
    )

    measure = _verb(
        verbs,
        _measure,
        "measure",
        "split the gap between a live model's learner and samplers into its causes",
        "trueup measure Qwen/Qwen2.5-0.5B-Instruct --sampler vllm:int8 --sampler vllm:bf16 --task gsm8k",
    )
    measure.add_argument("model", metavar="MODEL", help="folder, hub name, or mini")
    measure.add_argument(
        "--sampler", action="append", required=True, metavar="SPEC", help="engine:precision; repeatable"
    )
    measure.add_argument("--task", default="sums", help="whose held-out problems are asked (default: sums)")
    measure.add_argument("--prompts", type=int, default=32, help="problems asked (default: 32)")
    measure.add_argument("--samples", type=int, default=2, help="responses a problem (default: 2)")
    measure.add_argument("--max-tokens", type=int, default=128, help="longest response, tokens (default: 128)")
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument(
        "--out", metavar="NAME", help="write NAME.json, for trueup report, and the scored rollouts beside it as parquet"
    )

    from trueup.evaluate import command  # light: it imports nothing until it runs

    evaluate = _verb(
        verbs, _eval, "eval", "ask several engines the same prompts and compare them as pairs", command.EXAMPLE
    )
    command.add_options(evaluate)

    study = _verb(
        verbs,
        _study,
        "study",
        "run a grid of trainings and write one page about what it shows",
        "trueup study configs/studies/quick.yaml --out runs/quick",
    )
    study.add_argument("study", metavar="STUDY", help="YAML file, see docs/study.md")
    study.add_argument("--out", metavar="DIR", help="the study's folder (default: runs/studies/NAME); continues it")
    study.add_argument("--only", metavar="ARM", help="run this arm alone")
    study.add_argument("--cores", type=int, help="runs go side by side on so many (default: the study's, or all)")
    study.add_argument("--page-only", action="store_true", help="run nothing; write the page from what is there")

    report = _verb(
        verbs, _report, "report", "write one HTML page about a run, a dump or a ladder", "trueup report runs/first"
    )
    report.add_argument(
        "path", nargs="+", metavar="PATH", help="a run directory; files as for explain; or the JSON of trueup measure"
    )
    report.add_argument(
        "--out",
        metavar="FILE",
        help="default: report.html in the run, <dump>-report.html beside a dump, else in the current directory",
    )
    report.add_argument("--columns", help="OURS=THEIRS,... or a format, as for explain")
    report.add_argument("--tokenizer", metavar="DIR", help="for the text of tokens (default: the run's checkpoint)")

    mini = _verb(verbs, _mini, "mini", "make the mini model that ships with trueup", "trueup mini models/mini --seed 1")
    mini.add_argument("directory", metavar="DIR", help="where to write the model")
    mini.add_argument("--seed", type=int, default=0)
    return parser


def _verb(verbs, function, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=f"example: {example}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output, all else on standard error"
    )
    parser.set_defaults(verb=function)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from trueup.config import ConfigError
    from trueup.configfile import load_config

    source, overrides = arguments.config, arguments.overrides
    if source and "=" in source and not Path(source).exists():
        source, overrides = None, [source, *overrides]
    if arguments.resume:
        if source or overrides:
            raise ConfigError("--resume continues with the run's own config.yaml; leave CONFIG and overrides out")
        if not arguments.out:
            raise ConfigError("--resume needs --out DIR, the run directory to continue")
        if arguments.print_config:
            source = Path(arguments.out) / "config.yaml"
    config = load_config(source, overrides)
    if arguments.print_config:
        print(config.model_dump_json() if arguments.json else config.to_yaml())
        return 0
    from trueup.train import train

    out = arguments.out or _free_folder(Path("runs") / (Path(source).stem if source else config.task.partition(":")[0]))
    summary = train(config, out, resume=arguments.resume)
    if arguments.json:
        print(json.dumps(summary))
    else:
        from trueup.console import print_summary

        print_summary(summary)
    return 0


def _free_folder(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _explain(arguments: argparse.Namespace) -> int:
    from trueup.explain.gates import failed_gates, parse_gate
    from trueup.explain.text import print_verdict, progress_bar
    from trueup.explain.verdict import explain

    gates = [parse_gate(text) for text in arguments.gate]
    with progress_bar(arguments.dumps) as progress:
        verdict = explain(arguments.dumps, arguments.columns, arguments.tokenizer, progress)
    if arguments.json:
        print(json.dumps(verdict))
    else:
        print_verdict(verdict)
    reasons = failed_gates(gates, verdict["stats"])
    for reason in reasons:
        print(f"trueup: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def _measure(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from trueup.explain.live import measure_model, measured_json, print_ladders, write_measured
    from trueup.learner.model import load_tokenizer

    measured = measure_model(
        arguments.model,
        arguments.sampler,
        arguments.task,
        prompts=arguments.prompts,
        samples=arguments.samples,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        say=lambda text: print(text, file=sys.stderr),
    )
    tokenizer = load_tokenizer(arguments.model)
    found = measured_json(arguments.model, arguments.task, measured, tokenizer)
    if arguments.out:
        written = write_measured(found, measured, arguments.out)
        print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
    if arguments.json:
        print(json.dumps(found))
    else:
        print_ladders(measured, tokenizer, Console(highlight=False))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from trueup.evaluate.command import evaluate_command

    return evaluate_command(arguments)


def _study(arguments: argparse.Namespace) -> int:
    """1 where a run failed, 130 where a signal ended it: the next call continues."""
    from trueup.study import study
    from trueup.study.words import headline

    found = study(arguments.study, arguments.out, arguments.only, arguments.cores, arguments.page_only)
    print(json.dumps(found) if arguments.json else f"{headline(found)}\nwrote {found['out']}/index.html and README.md")
    return 130 if found["stopped_by"] else int(found["failed"] > 0)


def _report(arguments: argparse.Namespace) -> int:
    from trueup.explain.text import progress_bar
    from trueup.report import write_report

    path = arguments.path[0] if len(arguments.path) == 1 else arguments.path
    say = lambda text: print(f"trueup: {text}", file=sys.stderr)  # noqa: E731
    with progress_bar(arguments.path, passes=2) as progress:
        page = write_report(path, arguments.out, arguments.tokenizer, arguments.columns, progress, say)
    print(json.dumps({"report": str(page)}) if arguments.json else f"wrote {page}")
    return 0


def _mini(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from trueup.mini import make_mini

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("teaching")
        make_mini(
            arguments.directory,
            seed=arguments.seed,
            progress=lambda done, total, loss: bar.update(
                task, completed=done, total=total, description=f"loss {loss:.4f}"
            ),
        )
    print(json.dumps({"directory": arguments.directory}) if arguments.json else f"wrote {arguments.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
