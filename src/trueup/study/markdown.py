"""README.md of a study's folder: the same content as the page, for whoever reads it in a terminal or on a code host."""

from __future__ import annotations

from trueup.study import words
from trueup.study.results import OUTCOMES


def markdown(results: dict) -> str:
    parts = [
        f"# {_text(results['title'])}",
        _text(results["question"]),
        f"**{words.headline(results)}** Model {results['model']}, task {results['task']}, {results['steps']} steps, seeds "
        f"{', '.join(map(str, results['seeds']))}; trueup {results['trueup']}, {results['made']}. "
        "Curves: [index.html](index.html). All numbers: [study.json](study.json).",
        "\n".join(f"- {what}: {text}" for what, text in words.findings(results)),
        "## Arms",
        "Mean over seeds with its 95% Student interval. Accuracy is held-out, greedy, of the learner's own weights. Area: "
        "mean accuracy over the steps. The gap is of the rollouts as sampled, before any correction, mean over the steps.",
        _arms(results),
        *[
            part
            for outcome in OUTCOMES
            for part in (f"## {OUTCOMES[outcome].capitalize()} compared", _pairs(results, outcome))
        ],
        "Difference A \u2212 B in percentage points on common seeds; t: paired t test, flip: exact sign-flip permutation test, "
        "each two-sided, then Holm-adjusted over the table. Detectable: the true difference that would be found with 80% power, "
        "on its own and at Holm's strictest step.",
        "## What could have been seen",
        _list(words.resolution(results)),
        "## What the arms share",
        _list(words.fairness(results)),
        "## How the settings were chosen" if results["notes"] else "",
        _text(results["notes"]),
        "## Runs",
        _runs(results),
        "## To make it again",
        f"The whole study: `trueup study {results['file']} --out NEW`. One arm: add `--only ARM`. One run, in this folder:",
        "```sh\n" + "\n".join(words.rerun(results, arm, results["seeds"][0]) for arm in results["arms"]) + "\n```",
        "and any other seed likewise; [arms/](arms) holds every arm's settings in full.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def _list(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _table(head: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [head, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _arms(results: dict) -> str:
    head = [
        "arm",
        "seeds",
        *OUTCOMES.values(),
        "mean \\|pi - mu\\|".replace("\\", ""),
        "KL k3",
        "ESS tokens",
        "ESS responses",
    ]
    rows = []
    for arm in results["arms"]:
        gap = [
            words.quantity(name, arm["measured"].get(name, {}).get("mean"))
            for name in (
                "mismatch/prob_diff_mean",
                "mismatch/kl_k3",
                "mismatch/ess_token",
                "mismatch/ess_sequence",
                "correction/cut",
            )
        ]
        costs = ["-", "-"] if arm["seconds"] is None else [f"{arm['seconds']:.0f}", f"{arm['tokens']:,.0f}"]
        rows.append(
            [
                f"[{arm['name']}]({arm['config']})",
                str(arm["done"]),
                *[words.spread(arm["outcomes"].get(outcome)) for outcome in OUTCOMES],
                *gap,
                *costs,
            ]
        )
    return _table([*head, "cut", "seconds a run", "tokens a run"], rows)


def _pairs(results: dict, outcome: str) -> str:
    rows = []
    for row in results["comparisons"][outcome]:
        numbers = [row.get(name) for name in ("p_t", "p_t_holm", "p_flip", "p_flip_holm")]
        limits = [words.points(row.get(name)).lstrip("+") for name in ("detectable", "detectable_holm")]
        shown = [words.difference(row), *map(words.p_value, numbers), *limits, words.judged(row)]
        rows.append([row["a"], row["b"], str(len(row["seeds"])), *shown])
    head = [
        "A",
        "B",
        "seeds",
        "A \u2212 B, points",
        "p, t",
        "Holm",
        "p, flip",
        "Holm",
        "detectable",
        "with Holm",
        "A is",
    ]
    return _table(head, rows)


def _runs(results: dict) -> str:
    rows = []
    for arm in results["arms"]:
        for run in arm["runs"]:
            if run["state"] == "waiting":
                continue
            log = f"[log]({run['log']})"
            outcomes = [words.percent(run.get(outcome)) for outcome in OUTCOMES]
            rows.append(
                [arm["name"], f"[{run['seed']}]({run['folder']})", run["state"], str(run["steps"]), *outcomes, log]
            )
    return _table(["arm", "seed", "state", "steps", "final", "best", "area", "log"], rows)
