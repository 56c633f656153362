"""What the answers themselves say about how they were sampled, whatever the settings claim."""

from __future__ import annotations

import math
import os.path
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trueup.evaluate.divergence import first_difference, pairs_of
from trueup.evaluate.records import Answer, Evaluation
from trueup.evaluate.statistics import holm, mcnemar, sign_flip

SURE = 1e-4
"""p below which the answers count as evidence: many tests are made of every pair, and none may cry wolf."""
TAIL = tuple(math.log(chance) for chance in (1e-2, 1e-3, 1e-4, 1e-5))
STOPS = (
    "\n\n",
    "\n",
    "Question:",
    "Q:",
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "####",
    "```",
    "User:",
    "Human:",
)
"""Stop strings in common use, looked for where the settings name none."""


@dataclass(frozen=True)
class StopFound:
    """One engine stops where the other goes on."""

    stopping: str
    going: str
    string: str
    """Where the other's text goes on; the stop string, or its beginning."""
    count: int
    kept: bool
    """The string is at the very end of the other's texts: it stops there too, and keeps the string."""


def different_stops(first: Evaluation, second: Evaluation, least: int = 3) -> StopFound | None:
    """Responses of one engine that are the beginning of the other's: what the longer ones go on with, if it is the same.

    Rounding does that too, where a model wavers between ending and going on; but then the short response ends in a stop id.
    Where that is not known, one engine must be the shorter one every time, more often than chance would have it, and never
    write what the string begins with. Responses cut at the length limit are left out: they end anywhere.
    """
    rests: dict[bool, list[tuple[str, bool]]] = {True: [], False: []}
    for pair in pairs_of(first, second):
        for first_stops, short, long in ((True, pair.first, pair.second), (False, pair.second, pair.first)):
            if (
                short.finish_reason != "length"
                and len(short.text) < len(long.text)
                and long.text.startswith(short.text)
            ):
                ended = _ended_by_itself(short, (first, second)[not first_stops])
                if ended is not True:
                    rests[first_stops].append((long.text[len(short.text) :], ended is False))
    for first_stops, found in rests.items():
        string = os.path.commonprefix([rest for rest, _ in found])
        if len(found) < least or not (string.strip() or "\n" in string):
            continue
        stopping, going = (first, second) if first_stops else (second, first)
        proved = all(known for _, known in found)
        if not proved and (mcnemar(len(found), len(rests[not first_stops])) > SURE or _writes(stopping, _head(string))):
            continue
        kept = all(rest == string for rest, _ in found)
        return StopFound(stopping.name, going.name, string, len(found), kept)
    return _absent_string(first, second)


def _ended_by_itself(answer: Answer, evaluation: Evaluation) -> bool | None:
    """Whether the response ends in a stop id; None where ids or stop ids are not known."""
    stops = evaluation.settings.get("stop_token_ids")
    return None if not answer.ids or not stops else answer.ids[-1] in stops


def _head(string: str) -> str:
    """Its white space in front, or its first word: as little as a stop string may be that these texts are cut at."""
    space = string[: len(string) - len(string.lstrip())]
    return space or string.split()[0]


def _writes(evaluation: Evaluation, string: str) -> bool:
    return any(string in answer.text for item in evaluation.items for answer in item.answers)


def _absent_string(first: Evaluation, second: Evaluation) -> StopFound | None:
    """A stop string that many texts of one engine hold and none of the other's; for answers that share no beginning.

    Each problem counts once, for the engine whose answers hold it; McNemar's test over them.
    """
    known = {word for one in (first, second) for word in one.settings.get("stop") or []}
    for string in sorted(known | set(STOPS), key=len, reverse=True):
        only = Counter()
        for pair in pairs_of(first, second):
            holds = string in pair.first.text, string in pair.second.text
            only[holds] += 1
        one, other = only[True, False], only[False, True]
        if only[True, True] or (one and other) or mcnemar(one, other) > SURE / len(STOPS):
            continue
        stopping, going = (second, first) if one else (first, second)
        return StopFound(stopping.name, going.name, string, one + other, kept=False)
    return None


def past_stop(evaluation: Evaluation, stop_token_ids: set[int]) -> tuple[int, int] | None:
    """(id, responses) of a stop id that most often stands before a response's end: this engine does not stop there."""
    counts = Counter()
    for item in evaluation.items:
        for answer in item.answers:
            counts.update(stop_token_ids.intersection((answer.ids or [])[:-1]))
    return counts.most_common(1)[0] if counts else None


@dataclass(frozen=True)
class SupportFound:
    """One engine draws no unlikely tokens."""

    cut: str
    full: str
    chance: float
    """The probability below which it draws fewer."""
    counts: tuple[int, int]
    """Tokens below it: of the cut engine, of the other."""
    p: float


def cut_support(first: Evaluation, second: Evaluation) -> SupportFound | None:
    """Top-k, top-p, min-p or a lower temperature in one engine: its tail is missing.

    Tokens below a probability are counted per problem; under the same sampling either engine is as likely to have more of
    them, which the paired sign-flip test judges, Holm-corrected over four probabilities.
    """
    tails = []
    for tail in TAIL:
        counts = [[_below(item, tail) for item in _matched(first, second, which)] for which in (0, 1)]
        tails.append(np.array(counts, dtype=float))
    p_values = holm([sign_flip(counts[0] - counts[1]) for counts in tails])
    found = [
        (p, tail, counts.sum(axis=1))
        for p, tail, counts in zip(p_values, TAIL, tails)
        # Half or less: quantised weights move the tail too, by a tenth or two.
        if p < SURE and counts.sum(axis=1).min() < 0.5 * counts.sum(axis=1).max()
    ]
    if not found:
        return None
    p, tail, (one, other) = min(found, key=lambda entry: entry[0])
    cut, full = (first, second) if one < other else (second, first)
    return SupportFound(cut.name, full.name, math.exp(tail), (int(min(one, other)), int(max(one, other))), p)


def _matched(first: Evaluation, second: Evaluation, which: int) -> Iterator[list[list[float]]]:
    """Log-probs of every problem's answers in one of the two, in common order."""
    last = None
    for pair in pairs_of(first, second):
        if pair.sample == 0:
            if last is not None:
                yield last
            last = []
        last.append((pair.first, pair.second)[which].logprobs or [])
    if last is not None:
        yield last


def _below(answers: list[list[float]], tail: float) -> int:
    return sum(value is not None and value < tail for logprobs in answers for value in logprobs)


@dataclass(frozen=True)
class RepetitionFound:
    """One engine avoids tokens that were there before."""

    avoiding: str
    other: str
    counts: tuple[int, int]
    """First differences at which it takes the new token and the other a repeated one, and the reverse."""
    p: float


def avoided_repetition(first: Evaluation, second: Evaluation) -> RepetitionFound | None:
    """A repetition penalty in one engine: where the two part, it takes a token that was not there before and the other one
    that was. Without one, either way is as likely: a sign test over the responses that part so."""
    news = Counter()
    for pair in pairs_of(first, second):
        a, b = pair.first.ids, pair.second.ids
        if a is None or b is None:
            return None
        at = first_difference(a, b)
        if at is None or at >= min(len(a), len(b)):
            continue
        seen = set(pair.item.prompt_ids or []) | set(a[:at])
        if (a[at] in seen) != (b[at] in seen):
            news[a[at] not in seen] += 1
    p = mcnemar(news[True], news[False])
    if p >= SURE:
        return None
    avoiding, other = (first, second) if news[True] > news[False] else (second, first)
    return RepetitionFound(avoiding.name, other.name, (max(news.values()), min(news[True], news[False])), p)
