"""GSM8K: grade-school word problems whose answer is one number.

The answer is asked for as `#### <number>`. That is how the data's own solutions end and what published recipes train on;
it is one line that is cut without matching braces, and a model too small for LaTeX can write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trueup.tasks.answers import hashed_answer, read_number
from trueup.tasks.base import Problem
from trueup.tasks.jsonl import read_rows, split_by_prompt

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Think step by step. Then give the answer on a last line of its own, in this form: #### <number>"


class Gsm8k:
    """Question/answer rows from a folder, a file or the hub."""

    name = "gsm8k"

    def __init__(self, path: str | Path | None = None, heldout: int | None = None):
        """
        path: a folder with train.jsonl and test.jsonl, or one file, from which one row in ten is held out.
            None: `openai/gsm8k` from the hub.
        heldout: at most this many held-out rows, the first ones; None: all.
        """
        if path is None:
            train, held = (gsm8k_problems(rows) for rows in _from_hub())
        elif Path(path).expanduser().is_file():
            train, held = split_by_prompt(gsm8k_problems(read_rows(path)), path)
        else:
            folder = Path(path).expanduser()
            files = [folder / "train.jsonl", folder / "test.jsonl"]
            if missing := [str(file) for file in files if not file.is_file()]:
                raise FileNotFoundError(
                    f"gsm8k:{path}: no {' and no '.join(missing)}; expected a folder that holds train.jsonl and "
                    "test.jsonl, or one .jsonl file"
                )
            train, held = (gsm8k_problems(read_rows(file)) for file in files)
        self.train, self.heldout = train, held[:heldout]

    def score(self, problem: Problem, response: str) -> float:
        """1.0 if the number after the last `####` is the right one, 0.0 otherwise, also without the mark."""
        answer = read_number(hashed_answer(response) or "")
        return float(answer is not None and answer == read_number(problem.answer))

    def extract(self, response: str) -> str | None:
        """The answer that `score` judges: what follows the last `####`."""
        return hashed_answer(response)


def gsm8k_problems(rows: Iterable[tuple[str, dict]]) -> list[Problem]:
    """Rows of GSM8K with where they stand -> problems, the bare question kept beside the prompt."""
    problems = []
    for where, row in rows:
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise ValueError(f"{where}: expected the texts question and answer, found {', '.join(row) or 'nothing'}")
        answer = hashed_answer(solution)
        if answer is None or read_number(answer) is None:
            raise ValueError(
                f"{where}: the answer ends in {solution[-60:]!r}; expected #### and a number on its last line"
            )
        problems.append(Problem(f"{question.strip()}\n\n{INSTRUCTION}", answer, {"question": question.strip()}))
    if not problems:
        raise ValueError("gsm8k: no rows; expected one JSON object with question and answer a line")
    return problems


def _from_hub() -> tuple[Iterable[tuple[str, dict]], Iterable[tuple[str, dict]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "gsm8k without a path comes from the hub, through the datasets library, which is not installed: "
            "pip install 'trueup[hub]', or give a local folder, gsm8k:path/to/folder"
        ) from error
    data = load_dataset(HUB_NAME, "main")
    train, test = (
        ((f"{HUB_NAME} {split} row {number}", row) for number, row in enumerate(data[split], 1))
        for split in ("train", "test")
    )
    return train, test
