"""Your own problems: one JSON object a line, with a prompt and an answer."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from trueup.tasks.answers import final_answer, same_answer
from trueup.tasks.base import Problem

PROMPT_KEYS = ("prompt", "question", "problem")
ANSWER_KEYS = ("answer", "solution")
ROLES = ("system", "user", "assistant")
HELDOUT_SHARE = 10
"""Without a held-out file, one prompt in this many is held out, chosen by its hash."""


class Jsonl:
    """Rows of a file, judged as mathematics or as text."""

    def __init__(self, path: str | Path, heldout_path: str | Path | None = None, heldout: int | None = None):
        """
        path: rows to train on, and to hold out from where `heldout_path` is not given.
        heldout_path: rows to evaluate on. A train row that asks the same is left out of training, with a warning.
        heldout: at most this many held-out rows, the first ones; None: all.
        """
        self.name = f"jsonl:{path}"
        rows = read_problems(path)
        if heldout_path is None:
            self.train, held = split_by_prompt(rows, path)
        else:
            held = read_problems(heldout_path)
            asked = {_key(problem) for problem in held}
            self.train = [problem for problem in rows if _key(problem) not in asked]
            if not self.train:
                raise ValueError(f"every row of {path} is also in {heldout_path}: nothing is left to train on")
            if shared := len(rows) - len(self.train):
                warnings.warn(f"{shared} rows of {path} are also in {heldout_path}; left out of training", stacklevel=2)
        self.heldout = held[:heldout]

    def score(self, problem: Problem, response: str) -> float:
        """1.0 if the response's final answer is the row's, 0.0 otherwise."""
        return float(same_answer(problem.answer, final_answer(response)))


def from_spec(spec: str, heldout: int | None = None) -> Jsonl:
    """`jsonl:train.jsonl` or `jsonl:train.jsonl,heldout=test.jsonl` (a bare file name is looked for beside the first)."""
    path, given, heldout_path = spec.removeprefix("jsonl:").partition(",heldout=")
    if not spec.startswith("jsonl:") or not path or (given and not heldout_path):
        raise ValueError(
            f"task {spec!r} names no file; write jsonl:train.jsonl or jsonl:train.jsonl,heldout=test.jsonl"
        )
    if given and Path(heldout_path).name == heldout_path:
        heldout_path = Path(path).expanduser().parent / heldout_path
    return Jsonl(path, heldout_path if given else None, heldout)


def read_rows(path: str | Path) -> Iterator[tuple[str, dict]]:
    """(`file:line`, object) of each line that is not empty."""
    path = Path(path).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; expected a file with one JSON object a line")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}:{number}: not JSON ({error}); expected one object a line. It begins {line[:80]!r}"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}:{number}: {type(row).__name__} {str(row)[:80]!r}; expected an object such as "
                    '{"prompt": "2+2=", "answer": "4"}'
                )
            yield f"{path}:{number}", row


def read_problems(path: str | Path) -> list[Problem]:
    """Every row of a file as a problem; the first bad row is named by file and line."""
    problems = []
    for where, row in read_rows(path):
        prompt = _prompt(_field(row, PROMPT_KEYS, where), where)
        answer = _field(row, ANSWER_KEYS, where)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise ValueError(f"{where}: the answer is {answer!r}; expected text or a number that is not empty")
        # A worked solution (GSM8K's, MATH's) ends in its answer, marked the way responses mark theirs.
        problems.append(Problem(prompt, final_answer(str(answer))))
    if not problems:
        raise ValueError(f"{path} has no rows; expected one JSON object a line")
    return problems


def split_by_prompt(problems: list[Problem], path: str | Path) -> tuple[list[Problem], list[Problem]]:
    """(train, heldout): by a hash of the prompt, so that repeated prompts stay together and no seed moves any."""
    train, heldout = [], []
    for problem in problems:
        digest = hashlib.blake2b(_key(problem).encode(), digest_size=8).digest()
        (train if int.from_bytes(digest, "big") % HELDOUT_SHARE else heldout).append(problem)
    if not train or not heldout:
        raise ValueError(
            f"{path} has {len(problems)} rows, too few to hold one in {HELDOUT_SHARE} out; "
            "give held-out rows of your own: jsonl:train.jsonl,heldout=test.jsonl"
        )
    return train, heldout


def _field(row: dict, keys: tuple[str, ...], where: str):
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    near = [near for key in row if key not in keys for near in get_close_matches(key.lower(), keys, n=1)]
    hint = f"; should one of them be {near[0]!r}?" if near else ""
    found = ", ".join(f"{key} (null)" if row[key] is None else key for key in row) or "nothing"
    raise ValueError(f"{where}: no {keys[0]}: expected one of {', '.join(keys)}, found {found}{hint}")


def _prompt(prompt, where: str) -> str | list[dict[str, str]]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}: the prompt is {str(prompt)[:80]!r}; expected text or a list of chat messages")
    for message in prompt:
        sound = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not sound:
            raise ValueError(
                f"{where}: {str(message)[:80]!r} is no chat message; "
                'expected {"role": "system", "user" or "assistant", "content": text}'
            )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the prompt ends with the assistant's message; the model is to write that one")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _key(problem: Problem) -> str:
    return json.dumps(problem.prompt, sort_keys=True)
