"""Evaluations -> one row an engine and one row a pair, ready for JSON. Differences are second minus first, in [-1, 1]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from trueup.evaluate.harness import read_results
from trueup.evaluate.match import match
from trueup.evaluate.power import items_needed, minimum_detectable
from trueup.evaluate.records import Evaluation, Item
from trueup.evaluate.statistics import bootstrap, difference_interval, holm, mean_interval, pass_at_k, sign_flip
from trueup.evaluate.verdict import pair_verdict

SCHEMA = 1
ALPHA = 0.05


def compare_files(
    paths: Sequence[str | Path], *, metric: str | None = None, filter: str | None = None, common: bool = False
) -> dict:
    """`trueup eval compare`: `compare` of `read_all`."""
    return compare(read_all(paths, metric, filter), common=common)


def read_all(paths: Sequence[str | Path], metric: str | None = None, filter: str | None = None) -> list[Evaluation]:
    """Results of ours, lm-evaluation-harness or lighteval, in any mixture, each under a name of its own.

    paths: files or folders; NAME=PATH names an evaluation. metric, filter: which score of a harness's file counts
    (default: see `lmeval.py`). Raises ValueError or FileNotFoundError where there are not two evaluations to compare.
    """
    evaluations = [found for path in paths for found in read_results(path, metric=metric, filter=filter)]
    if len(evaluations) < 2:
        raise ValueError(f"one evaluation in {', '.join(map(str, paths))}; comparing needs two or more")
    _tell_apart(evaluations)
    return evaluations


def compare(evaluations: Sequence[Evaluation], *, common: bool = False) -> dict:
    """Every pair of evaluations. A null run (settings["run"] == "again") goes last, paired with its engine's first run only.

    -> {"schema", "items", "samples", "graded", "matched", "duplicates", "left_out", "engines", "pairs", "notes"}.
    Raises MismatchedSets (a ValueError) where problems or answers a problem differ.
    """
    if twice := _same_names(evaluations):
        raise ValueError(f"two evaluations are called {twice[0].name!r}; give each its own name")
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.settings.get("run") == "again")
    matched = match(evaluations, common=common)
    samples = len(matched.items[0][0].answers)
    scores = [_scores(evaluation, items) for evaluation, items in zip(evaluations, matched.items)]
    right_or_wrong = all(_right_or_wrong(items) for items in matched.items)
    engines = [_engine(evaluation, items) for evaluation, items in zip(evaluations, matched.items)]
    pairs = []
    for first, second in combinations(range(len(evaluations)), 2):
        null = _null(evaluations[first], evaluations[second])
        if null is not None:
            pair = _pair(scores[first], scores[second], samples if right_or_wrong else 0)
            names = {"a": evaluations[first].name, "b": evaluations[second].name, "null": null}
            pairs.append(names | _table(scores[first], scores[second], samples, right_or_wrong) | pair)
            same = _same_answers(matched.items[first], matched.items[second])
            pairs[-1]["identical"] = sum(same.values()) / (len(matched.items[first]) * samples)
            pairs[-1]["judged_differently"] = same["other score"]
    family = [pair for pair in pairs if not pair["null"]]
    for pair, adjusted in zip(family, holm([pair["p"] for pair in family])):
        pair["p_holm"] = adjusted
    for pair in pairs:
        _judge(pair, len(matched.items[0]), samples if right_or_wrong else 0, len(family))
    return {
        "schema": SCHEMA,
        "items": len(matched.items[0]),
        "samples": samples,
        "graded": not right_or_wrong,
        "matched": matched.how,
        "duplicates": matched.duplicates,
        "left_out": matched.left_out,
        "engines": engines,
        "pairs": pairs,
        "notes": _notes(evaluations, matched) + _verifiers(pairs),
    }


def _same_names(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    names = [evaluation.name for evaluation in evaluations]
    return [evaluation for evaluation in evaluations if names.count(evaluation.name) > 1]


def _tell_apart(evaluations: Sequence[Evaluation]) -> None:
    """Evaluations of one name are called after the first part of their paths in which they differ, too."""
    for name in {evaluation.name for evaluation in _same_names(evaluations)}:
        group = [evaluation for evaluation in evaluations if evaluation.name == name]
        parts = [Path(evaluation.settings["source"]).parts for evaluation in group]
        differing = [set(column) for column in zip(*parts)]
        where = next((place for place, column in enumerate(differing) if len(column) == len(group)), None)
        for number, (evaluation, path) in enumerate(zip(group, parts), start=1):
            evaluation.name = f"{name} ({number if where is None else path[where]})"


def _null(first: Evaluation, second: Evaluation) -> bool | None:
    """True: the null, an engine against itself; False: a comparison; None: a null run against another engine."""
    again = [evaluation.settings.get("run") == "again" for evaluation in (first, second)]
    if not any(again):
        return False
    same = all(first.settings.get(name) == second.settings.get(name) for name in ("engine", "model"))
    # Another folder is another evaluation, whose runs are no repetition of this one's.
    same &= Path(first.settings.get("source", "")).parent == Path(second.settings.get("source", "")).parent
    return True if same and not all(again) else None


def _scores(evaluation: Evaluation, items: Sequence[Item]) -> np.ndarray:
    score_I = np.array([item.score for item in items])
    fits_I = (score_I >= -1e-9) & (score_I <= 1 + 1e-9)  # NaN does not
    if not fits_I.all():
        item = items[int(np.argmin(fits_I))]
        raise ValueError(
            f"{evaluation.name}: {item.question[:60]!r} has the score {item.score}; shares from 0 to 1 are compared: "
            "choose another --metric"
        )
    return score_I.clip(0.0, 1.0)


def _right_or_wrong(items: Sequence[Item]) -> bool:
    return all(answer.correct in (0.0, 1.0) for item in items for answer in item.answers)


def _engine(evaluation: Evaluation, items: Sequence[Item]) -> dict:
    score_I, samples = np.array([item.score for item in items]), len(items[0].answers)
    interval = mean_interval(score_I)
    answers = [answer for item in items for answer in item.answers]
    tokens = all(answer.ids is not None for answer in answers)
    reasons = [answer.finish_reason for answer in answers]
    row = {
        "name": evaluation.name,
        "accuracy": float(score_I.mean()),
        "low": interval.low,
        "high": interval.high,
        "interval": interval.method,
        "pass_at_k": {},
        "mean_length": float(np.mean([len(answer.ids if tokens else answer.text) for answer in answers])),
        "length_unit": "tokens" if tokens else "characters",
        "truncated": None if None in reasons else reasons.count("length") / len(reasons),
        "tokens_per_second": evaluation.settings.get("tokens_per_second"),
    }
    if samples > 1 and _right_or_wrong(items):
        right_I = np.rint(score_I * samples)
        for k in sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples}):
            chance_I = pass_at_k(right_I, samples, k)
            low, high, _ = bootstrap(chance_I)
            row["pass_at_k"][str(k)] = {"value": float(chance_I.mean()), "low": low, "high": high}
    return row


def _table(first_I: np.ndarray, second_I: np.ndarray, samples: int, right_or_wrong: bool) -> dict:
    """Of problems. One answer: right in both, only in a, only in b, in neither. Otherwise: better in a, in b, equal."""
    better_a, better_b = int((first_I > second_I + 1e-9).sum()), int((second_I > first_I + 1e-9).sum())
    if samples == 1 and right_or_wrong:
        both = int(((first_I == 1) & (second_I == 1)).sum())
        neither = len(first_I) - both - better_a - better_b
        return {"both_right": both, "only_a": better_a, "only_b": better_b, "both_wrong": neither}
    return {"better_a": better_a, "better_b": better_b, "equal": len(first_I) - better_a - better_b}


def _pair(first_I: np.ndarray, second_I: np.ndarray, samples: int) -> dict:
    """samples: K where scores are multiples of 1/K, 0 where they are graded."""
    difference_I = second_I - first_I
    difference_I[np.abs(difference_I) < 1e-9] = 0.0
    interval, ninety = difference_interval(difference_I), difference_interval(difference_I, 0.90)
    return {
        "difference": float(difference_I.mean()),
        "low": interval.low,
        "high": interval.high,
        "interval": interval.method,
        "p": sign_flip(difference_I, samples or 1),
        "test": {0: "sign-flip", 1: "mcnemar-exact"}.get(samples, "sign-flip-exact"),
        "discordance": float((difference_I**2).mean()),
        # Two one-sided tests at 5%: the 90% interval lies within this distance of no difference.
        "equivalent_within": max(abs(ninety.low), abs(ninety.high)),
    }


def _judge(pair: dict, count: int, samples: int, family: int) -> None:
    # What Holm asks of the smallest p; power of the others is higher.
    alpha = ALPHA if pair["null"] else ALPHA / family
    p = pair["p"] if pair["null"] else pair["p_holm"]
    kind = samples if samples else 1000  # graded scores have next to no step
    pair["alpha"] = alpha
    pair["resolved"] = p <= ALPHA
    pair["minimum_detectable"] = minimum_detectable(count, pair["discordance"], alpha, kind)
    pair["items_needed"] = items_needed(pair["discordance"], pair["difference"], alpha, kind)
    needed = pair["items_needed"]
    pair["more_items"] = None if needed is None else max(0, needed - count)
    pair["verdict"] = pair_verdict(pair, count, family)


def _same_answers(first: Sequence[Item], second: Sequence[Item]) -> Counter[str]:
    """Answers that are the same, counted by their scores, `same score` or `other score`. The same: token for token where
    both sides have ids, otherwise letter for letter."""
    pairs = [pair for one, other in zip(first, second) for pair in zip(one.answers, other.answers)]
    ids = all(answer.ids is not None for pair in pairs for answer in pair)
    return Counter(
        "same score" if a.correct == b.correct else "other score"
        for a, b in pairs
        if (a.ids == b.ids if ids else a.text == b.text)
    )


def _notes(evaluations: Sequence[Evaluation], matched) -> list[str]:
    notes = []
    if matched.how == "contained":
        notes.append("prompts differ: problems were matched by a question that is contained in the other's prompt")
    if matched.duplicates:
        notes.append(f"{matched.duplicates} problems repeat another one; they were paired in order of occurrence")
    if matched.left_out:
        notes.append(f"{matched.left_out} problems are not in all evaluations and were left out")
    for evaluation in evaluations:
        reported, found = evaluation.settings.get("reported"), np.mean([item.score for item in evaluation.items])
        if reported is not None and abs(reported - found) > 1e-4:
            notes.append(
                f"{evaluation.name}: its harness reported {reported:.4f}, its samples average {found:.4f}; the harness "
                "aggregates otherwise, or the file is incomplete"
            )
    prompts = {evaluation.settings.get("prompt_texts_sha256") for evaluation in evaluations} - {None}
    if len(prompts) > 1 and matched.how == "content" and not matched.left_out:
        notes.append("the questions are the same, but not the prompts: a template, an instruction or examples differ")
    for setting in ("task", "metric", "filter"):
        values = {evaluation.settings[setting] for evaluation in evaluations if evaluation.settings.get(setting)}
        if len(values) > 1:
            notes.append(f"{setting} differs: {', '.join(sorted(map(str, values)))}")
    return notes


def _verifiers(pairs: Sequence[dict]) -> list[str]:
    return [
        f"{pair['a']} and {pair['b']}: {pair['judged_differently']:,} answers are the same but scored differently: what "
        "differs there is the verifier, not the engine"
        for pair in pairs
        if pair["judged_differently"]
    ]
