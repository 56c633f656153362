"""Multiple choice by log-likelihood: the answer is the choice that the model finds likeliest after the question.

Nothing is generated. Rows come from JSONL, parquet or the hub, in the layouts of the common benchmarks: a question with
choices and the right one's index, letter or text (MMLU, ARC, HellaSwag and their like).
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trueup.tasks.base import Problem
from trueup.tasks.jsonl import read_rows
from trueup.tasks.prompts import encode_prompt

QUESTION_KEYS = ("question", "prompt", "ctx", "query", "problem")
CHOICE_KEYS = ("choices", "endings", "options")
RIGHT_KEYS = ("answer", "answerKey", "label", "gold")
NORMS = ("none", "bytes", "tokens")


class Choice:
    """Questions with choices. `trueup eval` scores every choice and takes the best; there is nothing to train on."""

    name = "choice"

    def __init__(
        self,
        rows: Iterable[tuple[str, dict]],
        *,
        norm: str = "none",
        letters: bool = False,
        chat: bool = False,
        heldout: int | None = None,
    ):
        """
        rows: (where, row) pairs.
        norm: what a choice's log-likelihood is divided by: none (lm-eval's acc), its UTF-8 bytes (acc_norm), its tokens.
        letters: list the choices in the question and score their letters, as MMLU is asked; otherwise their texts.
        chat: ask within the chat template. Published scores of these benchmarks are mostly without.
        """
        if norm not in NORMS:
            raise ValueError(f"norm={norm!r}: expected {', '.join(NORMS)}")
        self.norm, self.letters, self.chat = norm, letters, chat
        self.heldout = []
        for where, row in rows:
            if heldout is not None and len(self.heldout) == heldout:
                break
            self.heldout.append(self._problem(where, row))
        if not self.heldout:
            raise ValueError("choice: no rows; expected one object with question, choices and answer a line")

    @property
    def train(self) -> Sequence[Problem]:
        raise ValueError("a choice task is for trueup eval: its answers are scored, not written; train on another task")

    def _problem(self, where: str, row: dict) -> Problem:
        question = _field(row, QUESTION_KEYS, where)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{where}: the question is {str(question)[:80]!r}; expected text")
        choices, labels = _choices(_field(row, CHOICE_KEYS, where), where)
        right = _right(_field(row, RIGHT_KEYS, where), choices, labels, where)
        shown = question.strip()
        if self.letters:
            listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, choices))
            shown = f"{shown}\n{listed}"
        # A context is a text to be continued, not a question; with letters the choices stand between the two.
        start = "" if "ctx" in row or self.letters else "Question: "
        end = "" if "ctx" in row and not self.letters else "\nAnswer:"
        prompt = f"{start}{shown}{end}"
        extra = {"question": question.strip(), "choices": choices, "right": right}
        return Problem(prompt, choices[right], extra)

    def score(self, problem: Problem, response: str) -> float:
        """1.0 if the response is the text of the right choice, 0.0 otherwise."""
        return float(response.strip() == problem.answer)

    def encode(self, problem: Problem, tokenizer) -> list[tuple[list[int], list[int]]]:
        """(context ids, choice ids) of each choice, tokenized together: where a token spans the seam, it belongs to the
        choice, so that every engine scores what the model would write."""
        prompt = problem.prompt if self.chat else _plain(problem.prompt)
        encoded = []
        for index, choice in enumerate(problem.extra["choices"]):
            shown = string.ascii_uppercase[index] if self.letters else choice
            if self.chat:
                context = encode_prompt(Problem(prompt), tokenizer)
                encoded.append((context, list(tokenizer.encode(shown, add_special_tokens=False))))
                continue
            context = _bare(prompt, tokenizer)
            whole = _bare(f"{prompt} {shown}", tokenizer)
            encoded.append((whole[: len(context)], whole[len(context) :]))
        for choice, (context, ids) in zip(problem.extra["choices"], encoded):
            if not context or not ids:
                raise ValueError(
                    f"the choice {choice!r} of {str(problem.prompt)[:80]!r} has {len(context)} context and {len(ids)} "
                    "choice tokens; both need at least 1"
                )
        return encoded

    def likelihood(self, logprobs: Sequence[float], choice: str) -> float:
        """What choices are compared by: the sum of their log-probs, over their length where `norm` says so."""
        length = {"none": 1, "bytes": len(choice.encode()), "tokens": len(logprobs)}[self.norm]
        return sum(logprobs) / max(length, 1)


def from_spec(spec: str, heldout: int | None = None) -> Choice:
    """`choice:PATH`, `choice:owner/dataset,config=NAME,split=test`, with `norm=bytes`, `letters=true`, `chat=true`."""
    source, *words = spec.partition(":")[2].split(",")
    if not source.strip():
        raise ValueError(f"task {spec!r} names no data; write choice:path/to/rows.jsonl")
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("norm", "letters", "chat", "config", "split"):
            raise ValueError(
                f"task {spec!r}: {word!r} is not a parameter of choice; "
                "write norm=, letters=, chat=, or for the hub config=, split="
            )
        given[name] = value
    for name in ("letters", "chat"):
        if name in given:
            if given[name] not in ("true", "false"):
                raise ValueError(f"task {spec!r}: {name}={given[name]}; expected true or false")
            given[name] = given[name] == "true"
    config, split = given.pop("config", None), given.pop("split", "test")
    path = Path(source).expanduser()
    if path.is_file():
        rows = _parquet(path) if path.suffix == ".parquet" else read_rows(path)
    elif source.count("/") == 1 and not path.parent.exists() and not path.suffix:
        rows = _from_hub(source, config, split)
    else:
        raise FileNotFoundError(
            f"{spec}: no file {source}; expected a .jsonl or .parquet file, or a dataset of the hub as owner/name"
        )
    return Choice(rows, heldout=heldout, **given)


def _plain(prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError("a choice prompt of chat messages needs chat=true")


def _bare(text: str, tokenizer) -> list[int]:
    """Without the chat template; the beginning-of-sequence token once, where the tokenizer puts one before a text."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer.encode("a")[:1] == [bos] and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def _field(row: dict, keys: tuple[str, ...], where: str):
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    raise ValueError(f"{where}: no {keys[0]}: expected one of {', '.join(keys)}, found {', '.join(row) or 'nothing'}")


def _choices(value, where: str) -> tuple[list[str], list[str]]:
    """(texts, labels); ARC holds both, in `{"text": [...], "label": [...]}`, others the texts alone."""
    labels = None
    if isinstance(value, dict):
        value, labels = value.get("text"), value.get("label")
    sound = (
        isinstance(value, list) and len(value) >= 2 and all(isinstance(text, str) and text.strip() for text in value)
    )
    if not sound or len(value) > len(string.ascii_uppercase):
        raise ValueError(f"{where}: the choices are {str(value)[:80]!r}; expected a list of 2 to 26 texts")
    if labels is not None and (not isinstance(labels, list) or len(labels) != len(value)):
        raise ValueError(f"{where}: {len(value)} choices have the labels {labels!r}; expected one each")
    texts = [text.strip() for text in value]
    return texts, [str(label) for label in labels or string.ascii_uppercase[: len(texts)]]


def _right(value, choices: list[str], labels: list[str], where: str) -> int:
    """Index of the right choice, given as an index, a label or the text itself."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    if isinstance(value, str):
        text = value.strip()
        for known in (labels, choices):
            if text in known:
                return known.index(text)
        if text.isdigit() and int(text) < len(choices):
            return int(text)
    raise ValueError(
        f"{where}: the answer is {value!r}; expected an index from 0 to {len(choices) - 1}, one of the labels "
        f"{', '.join(labels)}, or the text of a choice"
    )


def _parquet(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row


def _from_hub(name: str, config: str | None, split: str) -> Iterator[tuple[str, dict]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"choice:{name} comes from the hub, through the datasets library, which is not installed: "
            "pip install 'trueup[hub]', or give a local file, choice:path/to/rows.jsonl"
        ) from error
    for number, row in enumerate(load_dataset(name, config, split=split), 1):
        yield f"{name} {split} row {number}", row
