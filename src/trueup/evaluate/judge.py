"""Response ids -> a judged `Answer`: the text, cut at a stop string, what was read out of it, and what it scores."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.evaluate.records import Answer
from trueup.tasks.answers import boxed_answer, hashed_answer, tagged_answer
from trueup.tasks.base import Problem, Task
from trueup.tasks.prompts import decode_response


def judge(
    task: Task,
    problem: Problem,
    tokenizer,
    ids: Sequence[int],
    finish_reason: str,
    logprobs: Sequence[float],
    margins: Sequence[float] | None,
    stop: Sequence[str] = (),
) -> Answer:
    """logprobs, margins: one a token."""
    text, kept = cut_at_stop(list(ids), tokenizer, stop)
    if kept is not None:
        ids, logprobs, finish_reason = ids[:kept], logprobs[:kept], "stop"
        margins = None if margins is None else margins[:kept]
    score = task.score(problem, text)
    if score != score:
        raise ValueError(f"task {task.name} scored a response NaN: {text!r}; its verifier must return a number")
    return Answer(
        text,
        score,
        extract(task, text),
        list(ids),
        finish_reason,
        [float(value) for value in logprobs],
        None if margins is None else [float(value) for value in margins],
    )


def extract(task: Task, text: str) -> str | None:
    """The answer that the task's verifier reads; None where it finds none."""
    if own := getattr(task, "extract", None):
        return own(text)
    marks = {"####": hashed_answer, "\\boxed{": boxed_answer, "</answer>": tagged_answer}
    for mark in sorted(marks, key=text.rfind, reverse=True):
        if (answer := marks[mark](text)) is not None:
            return answer
    return None


def cut_at_stop(ids: list[int], tokenizer, stop: Sequence[str]) -> tuple[str, int | None]:
    """(the text before the first stop string, how many tokens it took to write that string); (the whole text, None)
    where there is none."""
    text = decode_response(ids, tokenizer)
    ends = [text.find(word) for word in stop]
    found = [(at, word) for at, word in zip(ends, stop) if at >= 0]
    if not found:
        return text, None
    at, word = min(found, key=lambda pair: pair[0])
    low, high = 1, len(ids)
    while low < high:  # the fewest tokens whose text holds it
        middle = (low + high) // 2
        if word in decode_response(ids[:middle], tokenizer):
            high = middle
        else:
            low = middle + 1
    return text[:at], low
