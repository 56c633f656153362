"""From run directories to numbers: outcomes a run, means and curves an arm, comparisons on common seeds.

The dictionary that `gather` returns is `study.json`; the pages are made from it alone.
"""

from __future__ import annotations

import math
from datetime import date

import numpy as np

import trueup
from trueup.study.design import Study
from trueup.study.runs import Run
from trueup.study.statistics import area, bootstrap_band, detectable, holm, interval, paired

OUTCOMES = {
    "final": "final accuracy",
    "best": "best accuracy",
    "area": "area under the curve",
}
"""Of the held-out accuracy; `area` is its mean over the steps, from the initial weights on."""

CURVES = (
    "eval/accuracy",
    "reward/mean",
    "mismatch/kl_k3",
    "mismatch/prob_diff_mean",
    "mismatch/ess_token",
    "mismatch/ess_sequence",
    "correction/cut",
    "policy/entropy",
    "response/length_mean",
    "policy/kl_old",
    "policy/clip_fraction",
    "policy/grad_norm",
    "staleness/mean",
)
"""Drawn over the steps. `correction/cut` is truncated_fraction + masked_fraction."""

MEASURED = (
    "mismatch/kl_k3",
    "mismatch/prob_diff_mean",
    "mismatch/ess_token",
    "mismatch/ess_sequence",
    "correction/cut",
)
"""Mean over the steps of a run, for tables."""


def gather(study: Study, runs: list[Run]) -> dict:
    """All numbers of a study, from what its folder holds now. Outcomes count runs that are done, no others."""
    arms = []
    for arm in study.arms:
        own = [(run, _run(run)) for run in runs if run.arm is arm]
        arms.append(
            {
                "name": arm.name,
                "labels": arm.labels,
                "overrides": list(arm.overrides),
                "config": f"arms/{arm.name}.yaml",
                "runs": [found for _, found in own],
                "curves": _curves([run for run, found in own if found["state"] == "done"]),
                **_summary([found for _, found in own if found["state"] == "done"]),
            }
        )
    config = study.arms[0].config
    return {
        "schema": 1,
        "study": study.name,
        "file": str(study.path),
        "title": study.title,
        "question": study.file.question,
        "notes": study.file.notes,
        "made": date.today().isoformat(),
        "trueup": trueup.__version__,
        "model": config.model,
        "task": config.task,
        "algorithms": sorted({arm.config.algorithm for arm in study.arms}),
        "steps": config.steps,
        "seeds": list(study.seeds),
        "evaluation": {"every": config.log.eval_every, "problems": config.log.eval_problems},
        "arms": arms,
        "comparisons": {outcome: compare(arms, study.pairs, outcome) for outcome in OUTCOMES},
        "shared": _shared(arms, study.seeds),
        "against": _against(study, arms),
        "done": sum(run["state"] == "done" for arm in arms for run in arm["runs"]),
        "failed": sum(run["state"] == "failed" for arm in arms for run in arm["runs"]),
        "runs": len(runs),
    }


def _run(run: Run) -> dict:
    """One run: where it lies, how it stands, its outcomes and its costs."""
    rows, record = run.rows(), run.record()
    found = {
        "seed": run.seed,
        "state": "done" if run.done() else record.get("state", "started") if run.started or record else "waiting",
        "folder": run.folder.relative_to(run.out).as_posix(),
        "log": run.log.relative_to(run.out).as_posix(),
        "steps": rows[-1]["step"] if rows else 0,
    }
    if found["state"] == "failed":
        found["says"] = record["says"]
    if not rows:
        return found
    before = run.accuracy_before()
    points = [] if before is None else [(0, before)]
    points += [(row["step"], row["eval/accuracy"]) for row in rows if row.get("eval/accuracy") is not None]
    found |= {
        "accuracy": points,
        "prompts": run.prompts_hash(),
        "accuracy_before": before,
        "seconds": sum(row["time/step"] for row in rows),
        "tokens": int(sum(row["mismatch/tokens"] for row in rows)),
        "measured": {name: _mean(_column(rows, name)) for name in MEASURED},
    }
    if found["state"] == "done" and points:
        steps, values = zip(*points)
        found |= {"final": values[-1], "best": max(values), "area": area(steps, values)}
    return found


def _column(rows: list[dict], name: str) -> list[float | None]:
    if name == "correction/cut":
        parts = [_column(rows, f"correction/{part}_fraction") for part in ("truncated", "masked")]
        return [None if None in both else sum(both) for both in zip(*parts)]
    return [float(value) if (value := row.get(name)) is not None else None for row in rows]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _summary(done: list[dict]) -> dict:
    """Over the seeds of an arm: mean and Student interval of what each run has."""
    kept = [run for run in done if "final" in run]
    if not kept:
        return {"done": 0, "outcomes": {}, "measured": {}, "seconds": None, "tokens": None}
    spread = lambda values: dict(zip(("mean", "low", "high"), interval(values)))  # noqa: E731
    measured = {}
    for name in MEASURED:
        known = [run["measured"][name] for run in kept if run["measured"][name] is not None]
        if known:
            measured[name] = spread(known)
    return {
        "done": len(kept),
        "outcomes": {outcome: spread([run[outcome] for run in kept]) for outcome in OUTCOMES},
        "measured": measured,
        "seconds": _mean([run["seconds"] for run in kept]),
        "tokens": _mean([run["tokens"] for run in kept]),
    }


def _curves(runs: list[Run]) -> dict:
    """Metric -> steps, mean over seeds, and the bootstrap band where there are two seeds or more."""
    tables = [run.rows() for run in runs]
    curves = {}
    for name in CURVES:
        series = [_series(rows, name) for rows in tables]
        if name == "eval/accuracy":
            for run, points in zip(runs, series):
                if (before := run.accuracy_before()) is not None:
                    points[0] = before
        # Steps that every seed has: a mean over other seeds at another step would make steps of its own.
        steps = sorted(set.intersection(*map(set, series))) if series else []
        if not steps:
            continue
        values_ST = np.array([[points[step] for step in steps] for points in series])
        curve = {"steps": steps, "mean": _short(values_ST.mean(axis=0))}
        if len(series) > 1:
            low, high = bootstrap_band(values_ST)
            curve |= {"low": _short(low), "high": _short(high)}
        curves[name] = curve
    return curves


def _series(rows: list[dict], name: str) -> dict[int, float]:
    return {row["step"]: value for row, value in zip(rows, _column(rows, name)) if value is not None}


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def compare(arms: list[dict], pairs: tuple[tuple[str, str], ...], outcome: str) -> list[dict]:
    """A minus B for each pair on the seeds that both have done; p values adjusted by Holm over all pairs."""
    by_name = {arm["name"]: {run["seed"]: run[outcome] for run in arm["runs"] if outcome in run} for arm in arms}
    rows = []
    for a, b in pairs:
        seeds = sorted(by_name[a].keys() & by_name[b].keys())
        row = {"a": a, "b": b, "seeds": seeds}
        if seeds:
            found = paired([by_name[a][seed] for seed in seeds], [by_name[b][seed] for seed in seeds])
            row |= vars(found)
            row["differences"] = [by_name[a][seed] - by_name[b][seed] for seed in seeds]
        rows.append(row)
    tested = [row for row in rows if row["seeds"]]
    for kind in ("t", "flip"):
        for row, p in zip(tested, holm([row[f"p_{kind}"] for row in tested])):
            row[f"p_{kind}_holm"] = p
    for row in tested:
        row["detectable"] = detectable(row["sd"], row["n"])
        row["detectable_holm"] = detectable(row["sd"], row["n"], alpha=0.05 / len(tested))
    return rows


def _shared(arms: list[dict], seeds: tuple[int, ...]) -> list[dict]:
    """Per seed: the digests of the first prompts and the accuracies of the initial weights, which must be one each."""
    shared = []
    for seed in seeds:
        runs = [run for arm in arms for run in arm["runs"] if run["seed"] == seed]
        prompts = sorted({run["prompts"] for run in runs if run.get("prompts")})
        starts = sorted({run["accuracy_before"] for run in runs if run.get("accuracy_before") is not None})
        shared.append(
            {"seed": seed, "runs": sum("prompts" in run for run in runs), "prompts": prompts, "starts": starts}
        )
    return shared


def _against(study: Study, arms: list[dict]) -> dict | None:
    """Per outcome and line of the figure: each arm's measured metric and outcome, mean and interval over seeds."""
    asked = study.file.against
    if asked is None:
        return None
    outcomes: dict[str, dict[str, list[dict]]] = {"final": {}, "area": {}}
    for outcome, lines in outcomes.items():
        for arm in arms:
            done = [run for run in arm["runs"] if outcome in run and run["measured"].get(asked.metric) is not None]
            if done:
                x = _mean([run["measured"][asked.metric] for run in done])
                mean, low, high = interval([run[outcome] for run in done])
                point = {"arm": arm["name"], "x": x, "mean": mean, "low": low, "high": high}
                lines.setdefault(arm["labels"][asked.by], []).append(point)
        for points in lines.values():
            points.sort(key=lambda point: point["x"])
    return {"metric": asked.metric, "by": asked.by, "outcomes": outcomes}


def finite(value):
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
