"""The procedural tasks of the reasoning-gym library, scored by its verifiers, as far as those only read an answer.

Audited: reasoning-gym 0.1.25, all 106 datasets, by reading every verifier and by feeding each one wrong answers.
Some run what the model wrote (`eval`, sympy's `parse_expr`), some reward any answer, some ask something else in every
process. Those are judged here instead, or refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fractions import Fraction

from trueup.tasks.answers import read_number, tagged_answer
from trueup.tasks.arithmetic import compute
from trueup.tasks.base import Problem, VirtualRows

INSTRUCTION = (
    "Think step by step. Then give the final answer, in exactly the form that is asked for, "
    "between <answer> and </answer>."
)
"""The library's own convention, the tags that its `extract_answer` looks for."""

MAX_LENGTH = 10_000
"""Characters of an answer. The longest right ones, boards and matrices, have some thousands."""
ROWS = 1_000_000
FEWER_ROWS = {"word_ladder": 20_000, "acre": 5_000}
"""word_ladder allows no more; acre makes all its problems at once, 0.3 ms each."""

RUNS_ANSWERS = "its verifier runs the model's answer as code"
REFUSED = {
    "simple_integration": RUNS_ANSWERS,
    "intermediate_integration": RUNS_ANSWERS,
    "polynomial_multiplication": RUNS_ANSWERS,
    "codeio": "its problems are made by running code that a language model wrote",
    "composite": "it needs a nested configuration, which a task spec cannot hold",
}
HASH_ORDERED = {"isomorphic_strings", "ransom_note", "knight_swap"}
"""Generated in the order of Python sets of strings, which differs from process to process."""

EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify|S)\(")
EVALUATES_ITS_OWN = {"number_sorting", "basic_arithmetic", "bitwise_arithmetic", "propositional_logic"}
"""Evaluate their own problem or reference, or have a harmless function of such a name. Never the answer."""


def _exactly(answer: str, entry: dict) -> bool:
    return answer.strip() == entry["answer"].strip()


def _expression(answer: str, target: int, numbers: Sequence[int]) -> bool:
    computed = compute(answer)
    return computed is not None and computed[0] == target and sorted(computed[1]) == sorted(numbers)


def _probability(answer: str, entry: dict) -> bool:
    given, right = read_number(answer), read_number(entry["answer"])
    return given is not None and abs(given.value - right.value) <= Fraction(1, 10_000)


JUDGED_HERE: dict[str, Callable[[str, dict], bool]] = {
    # The library evaluates the answer as arithmetic, or (puzzle24) takes any four numbers that make 24.
    "countdown": lambda answer, entry: _expression(answer, entry["metadata"]["target"], entry["metadata"]["numbers"]),
    "puzzle24": lambda answer, entry: _expression(answer, 24, entry["metadata"]["numbers"]),
    # It evaluates the answer as a Python list, for a tenth or half of the reward.
    "binary_matrix": _exactly,
    "spiral_matrix": _exactly,
    "string_insertion": _exactly,
    "n_queens": lambda answer, entry: answer.strip() in entry["metadata"]["valid_answers"],
    # It takes any answer that is not empty.
    "game_of_life_halting": _exactly,
    # It takes "0" for every probability, and computes 1e99999999 exactly, for hours.
    "coin_flip": _probability,
}


class Rows(VirtualRows):
    """Problems of one of the library's datasets, from its seed and their index."""

    def __init__(self, dataset, length: int):
        super().__init__(length)
        self.dataset = dataset

    def problem(self, index: int) -> Problem:
        with contextlib.redirect_stdout(sys.stderr):  # some generators print; standard output is for results
            entry = self.dataset[index]
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some puzzles have no single right answer
        return Problem(f"{entry['question'].strip()}\n\n{INSTRUCTION}", answer, extra={"entry": entry})


class ReasoningGym:
    """One dataset of the library. Splits differ in every generator seed; few of the smallest problems may repeat."""

    def __init__(self, dataset: str, seed: int = 0, heldout: int = 256, parameters: dict | None = None):
        """
        seed: which train problems are drawn; seeds 4,000 apart draw the same. The held-out ones are the same for every
            seed, so that runs with different seeds are measured by one ruler.
        heldout: rows of the held-out split; 256 puts the standard error of an accuracy at 3 points or less.
        parameters: fields of the dataset's own configuration.
        """
        self.name, self.dataset_name = f"reasoning_gym:{dataset}", dataset
        rows = FEWER_ROWS.get(dataset, ROWS)
        # The library makes problem i of a dataset from the number (its seed + i), so ranges of seeds that lie ROWS apart
        # share nothing. Below 2**32, because some generators use numpy's old seeding.
        self.train = Rows(_create(dataset, ROWS * (1 + seed % 4000), rows, parameters or {}), rows)
        self.heldout = Rows(_create(dataset, 0, rows, parameters or {}), min(heldout, rows))

    def score(self, problem: Problem, response: str) -> float:
        """The verifier's reward in [0, 1] for what stands in the last <answer> tags; 0.0 without them."""
        answer, entry = tagged_answer(response), problem.extra["entry"]
        if answer is None or len(answer) > MAX_LENGTH:
            return 0.0
        if self.dataset_name in JUDGED_HERE:
            return float(JUDGED_HERE[self.dataset_name](answer, entry))
        if self.dataset_name == "complex_arithmetic" and "nan" in answer.lower():
            return 0.0  # its verifier gives 1 for a distance that is not a number
        try:
            reward = float(self.train.dataset.score_answer(answer, entry))
        except Exception:  # verifiers raise on answers they did not expect, and those are wrong answers
            return 0.0
        return min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0


def from_spec(spec: str, seed: int = 0, heldout: int = 256) -> ReasoningGym:
    """`reasoning_gym:countdown`, or with parameters `reasoning_gym:countdown,min_numbers=3,max_numbers=3`."""
    dataset, *parts = spec.removeprefix("reasoning_gym:").split(",")
    if not spec.startswith("reasoning_gym:") or not dataset:
        raise ValueError(f"task {spec!r} names no dataset; write for example reasoning_gym:countdown")
    parameters = {}
    for part in parts:
        key, equals, value = part.strip().partition("=")
        if not equals or not key:
            raise ValueError(f"task {spec!r}: {part!r} is not a parameter; write key=value, as in min_numbers=3")
        try:
            parameters[key] = json.loads(value)
        except ValueError:
            parameters[key] = value
    return ReasoningGym(dataset, seed, heldout, parameters)


def _create(dataset: str, seed: int, size: int, parameters: dict):
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(
            f"reasoning_gym:{dataset} needs the reasoning-gym library, which is not installed: pip install 'trueup[gym]'"
        ) from error
    if dataset not in DATASETS:
        near = get_close_matches(dataset, DATASETS, n=3)
        hint = f"; near names: {', '.join(near)}" if near else f"; it has {', '.join(sorted(DATASETS))}"
        raise ValueError(f"reasoning-gym has no dataset {dataset!r}{hint}")
    dataset_class, config_class = DATASETS[dataset]
    _refuse_unsafe(dataset, dataset_class)
    fields = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    for key in parameters:
        if key not in fields:
            near = get_close_matches(key, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"reasoning_gym:{dataset} has no parameter {key!r}; it has {', '.join(fields)}.{hint}")
    try:
        return create_dataset(dataset, seed=seed, size=size, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        raise ValueError(f"reasoning_gym:{dataset} refuses {given or 'its defaults'}: {error}") from error


def _refuse_unsafe(dataset: str, dataset_class: type) -> None:
    if dataset in REFUSED:
        raise ValueError(f"reasoning_gym:{dataset} is not offered: {REFUSED[dataset]}. Choose another dataset")
    if dataset in HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise ValueError(
            f"reasoning_gym:{dataset} makes other problems in every process, so that a resumed run would not continue the "
            "same one. Set the environment variable PYTHONHASHSEED=0 before Python starts, or choose another dataset"
        )
    # A later release may bring datasets that nobody audited; those that evaluate anything are not trusted.
    if dataset not in JUDGED_HERE and dataset not in EVALUATES_ITS_OWN:
        found = EVALUATES.search(inspect.getsource(sys.modules[dataset_class.__module__]))
        if found:
            raise ValueError(
                f"reasoning_gym:{dataset} is not offered: its code calls {found[0]}...), and it was not checked that no "
                "model output reaches it. Choose another dataset, or install reasoning-gym 0.1.25"
            )
