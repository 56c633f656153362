"""Two engines' prompts, id by id: where they differ, and what that is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trueup.evaluate.divergence import first_difference, pairs_of
from trueup.evaluate.records import Evaluation

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class PromptsFound:
    """How prompts differ."""

    cause: str
    """`doubled BOS`, `BOS`, `system prompt`, `chat template`, `tokenizer` or `prompt`."""
    count: int
    """Prompts that differ."""
    compared: int
    ours: list[int]
    """The ids that differ in the first such prompt, of the first engine."""
    theirs: list[int]
    example: int
    """Which prompt that is."""

    def shown(self, ids: list[int], decode: Decode | None) -> str:
        text = repr(decode(ids)) if decode and ids else f"ids {ids[:24]}{'...' if len(ids) > 24 else ''}"
        return (text[:160] + "...") if len(text) > 160 else text if ids else "nothing"


def compare_prompts(first: Evaluation, second: Evaluation, decode: Decode | None = None) -> PromptsFound | None:
    """None where all prompts are the same ids. Raises ValueError where there are no ids to compare."""
    pairs = list(_prompts(first, second))
    middles = [(place, *_middle(a, b)) for place, (a, b) in enumerate(pairs) if a != b]
    if not middles:
        return None
    place, before, ours, theirs, after = middles[0]
    cause = _cause(first, second, pairs, middles, decode)
    return PromptsFound(cause, len(middles), len(pairs), ours, theirs, place)


def _cause(first, second, pairs, middles, decode: Decode | None) -> str:
    if all(_extra_start(*pairs[place]) for place, *_ in middles):
        longer = [max(pairs[place], key=len) for place, *_ in middles]
        return "doubled BOS" if all(ids[:1] == ids[1:2] for ids in longer) else "BOS"
    if decode and all(decode(pairs[place][0]) == decode(pairs[place][1]) for place, *_ in middles):
        return "tokenizer"
    one_change = len({(tuple(ours), tuple(theirs)) for _, _, ours, theirs, _ in middles}) == 1
    at_end = all(after == 0 for *_, after in middles)
    templates = [one.settings.get("chat_template_sha256") for one in (first, second)]
    if len(middles) < len(pairs) or not one_change:
        # Different questions: nothing that is around them explains it, unless both ends moved.
        return "chat template" if templates[0] != templates[1] else "prompt"
    if at_end or templates[0] != templates[1]:
        return "chat template"
    # The same change in every prompt, before the question, under the same template: what was put into the template.
    return "system prompt"


def doubled_start(evaluation: Evaluation) -> int | None:
    """The id that every prompt of an evaluation begins with twice, if it is the beginning-of-sequence token (or nobody says
    which that is)."""
    prompts = [item.prompt_ids for item in evaluation.items if item.prompt_ids]
    starts = {tuple(ids[:2]) for ids in prompts}
    if len(starts) != 1:
        return None
    start = starts.pop()
    bos = evaluation.settings.get("bos_token_id", start[0] if len(prompts) > 2 and start else None)
    return start[0] if len(start) == 2 and start[0] == start[1] == bos else None


def _prompts(first: Evaluation, second: Evaluation) -> Iterator[tuple[list[int], list[int]]]:
    for pair in pairs_of(first, second):
        if pair.sample:
            continue
        if pair.item.prompt_ids is None or pair.other.prompt_ids is None:
            raise ValueError("no prompt ids to compare")
        yield pair.item.prompt_ids, pair.other.prompt_ids


def _extra_start(a: list[int], b: list[int]) -> bool:
    """Whether one is the other with one token more in front."""
    long, short = (a, b) if len(a) > len(b) else (b, a)
    return len(long) == len(short) + 1 and long[1:] == short


def _middle(a: list[int], b: list[int]) -> tuple[int, list[int], list[int], int]:
    """(tokens both begin with, what stands between in a, in b, tokens both end with)."""
    before = first_difference(a, b)
    rest_a, rest_b = a[before:], b[before:]
    after = first_difference(rest_a[::-1], rest_b[::-1])
    after = min(len(rest_a), len(rest_b)) if after is None else after
    return before, rest_a[: len(rest_a) - after], rest_b[: len(rest_b) - after], after
