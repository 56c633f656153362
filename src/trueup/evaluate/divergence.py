"""Where two engines part: how many responses are the same token for token, how close the call was where they first differ,
and what kind of difference turns a right answer into a wrong one.

Greedy decoding takes the token that is ahead. Where two engines first take different tokens they have seen the same
context, so engine A's lead (its margin there) plus engine B's lead is exactly how far the two log-prob differences lie
apart: the *move*. Where they agree the move is the difference of their margins. Moves at positions where they agree
are the noise of this pair; moves of the same engine in other batches, and of two engines of one precision, are rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trueup.evaluate.match import match
from trueup.evaluate.records import Answer, Evaluation, Item

CLOSE = 2.0
"""Nats. Noise is measured at positions with a smaller margin than this: confident positions are noisier, and never flip."""
FEW = 200
"""With fewer close positions than this, noise is measured at all positions."""
KINDS = ("verifier", "truncation", "stop", "format", "reasoning")


@dataclass(frozen=True)
class Pair:
    """One problem's answers by two engines."""

    item: Item
    other: Item
    """The same problem in the second evaluation."""
    sample: int
    first: Answer
    second: Answer


@dataclass(frozen=True)
class Flip:
    """A response that is right in one engine and wrong in the other."""

    pair: Pair
    kind: str
    """`reasoning`: both give an answer and they differ; `format`: the wrong one gives none that could be read; `truncation`: it
    was cut at the length limit before; `stop`: one is the start of the other; `verifier`: the same text was judged twice,
    differently."""
    at: int | None
    """Position of the first difference, tokens (characters where there are no ids); None: the same text."""
    call: str | None
    """`tie`, `noise` or `disagreement` of that position."""

    @property
    def gained(self) -> bool:
        """Right in the second engine."""
        return self.pair.second.correct > self.pair.first.correct


@dataclass(frozen=True)
class Divergence:
    """Of two evaluations, response by response."""

    first: str
    second: str
    unit: str
    """What `positions` counts: `tokens`, `characters` where there are no ids, `choices` for multiple choice."""
    responses: int
    identical: int
    positions: list[int]
    """Of the first difference, one a response that differs."""
    lengths: list[int]
    """Of the shorter of the two responses that differ, in the same unit."""
    moves: list[float | None]
    """Nats, one a response that differs; None: no margins (not greedy, or one response is the start of the other)."""
    tie_bound: float | None
    """Moves up to this are what rounding does: the same engine in other batches, or two engines of one precision. None: no
    such pair was run."""
    noise_bound: float | None
    """Moves up to this are this pair's usual noise where both take the same token."""
    null: bool = False
    """One engine, run twice."""
    calls: dict[str, int] = field(default_factory=dict)
    """Differences by call: `tie`, `noise`, `disagreement`, `unknown`."""
    flips: list[Flip] = field(default_factory=list)

    @property
    def identical_share(self) -> float:
        return self.identical / max(self.responses, 1)

    def kinds(self) -> dict[str, int]:
        """Flips by kind, the most frequent first."""
        return dict(Counter(flip.kind for flip in self.flips).most_common())

    def to_json(self) -> dict:
        known = [move for move in self.moves if move is not None]
        return {
            "first": self.first,
            "second": self.second,
            "unit": self.unit,
            "responses": self.responses,
            "identical": self.identical,
            "identical_share": self.identical_share,
            "position_median": float(np.median(self.positions)) if self.positions else None,
            "position_low": float(np.quantile(self.positions, 0.1)) if self.positions else None,
            "position_high": float(np.quantile(self.positions, 0.9)) if self.positions else None,
            "move_median": float(np.median(known)) if known else None,
            "move_max": max(known, default=None),
            "tie_bound": self.tie_bound,
            "noise_bound": self.noise_bound,
            "calls": self.calls,
            "flips": len(self.flips),
            "flips_gained": sum(flip.gained for flip in self.flips),
            "flip_kinds": self.kinds(),
        }


def diverge(
    first: Evaluation,
    second: Evaluation,
    rounding: Sequence[tuple[Evaluation, Evaluation]] = (),
    null: bool = False,
) -> Divergence:
    """Compare two evaluations of the same problems (matched by what they ask, sample by sample).

    rounding: pairs that nothing but rounding tells apart: a null, or two engines of the same weights in the same precision.
        The largest of their noises bounds what is called a tie.
    null: `first` and `second` are one engine, run twice.
    """
    unit = _unit(first, second)
    tie_bounds = [bound for one, other in rounding if (bound := _bound(_moves(one, other))) is not None]
    tie_bound = max(tie_bounds, default=None)
    noise_bound = _bound(_moves(first, second))
    found = {"positions": [], "lengths": [], "moves": []}
    calls, flips, identical, responses = Counter(), [], 0, 0
    for pair in pairs_of(first, second):
        responses += 1
        a, b = _sequence(pair.first, unit), _sequence(pair.second, unit)
        at = first_difference(a, b)
        call = None
        if at is None:
            identical += 1
        else:
            move = _move(pair, at, unit)
            call = _call(move, tie_bound, noise_bound)
            calls[call] += 1
            found["positions"].append(at)
            found["lengths"].append(min(len(a), len(b)))
            found["moves"].append(move)
        if pair.first.correct != pair.second.correct:
            flips.append(Flip(pair, flip_kind(pair, unit), at, call))
    return Divergence(
        first.name,
        second.name,
        unit,
        responses,
        identical,
        tie_bound=tie_bound,
        noise_bound=noise_bound,
        null=null,
        calls=dict(calls),
        flips=flips,
        **found,
    )


def pairs_of(first: Evaluation, second: Evaluation) -> Iterator[Pair]:
    """Of the problems that both hold, in the order of `first`. Raises ValueError where they share none, or where one has more
    answers a problem."""
    ours, theirs = match([first, second], common=True).items
    for item, other in zip(ours, theirs):
        for sample, (a, b) in enumerate(zip(item.answers, other.answers, strict=True)):
            yield Pair(item, other, sample, a, b)


def first_difference(a: Sequence, b: Sequence) -> int | None:
    """Index of the first element that differs, the length of the shorter where it is the start of the other; None: equal."""
    for at, (one, other) in enumerate(zip(a, b)):
        if one != other:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def flip_kind(pair: Pair, unit: str = "tokens") -> str:
    """Why the wrong one of the two is wrong, read from what is there: see `Flip.kind`."""
    right, wrong = sorted((pair.first, pair.second), key=lambda answer: -answer.correct)
    if right.text == wrong.text:
        return "verifier"
    if unit == "choices":
        return "reasoning"
    if wrong.finish_reason == "length" and _silent(wrong):
        return "truncation"
    if right.text.startswith(wrong.text) or wrong.text.startswith(right.text):
        return "stop"
    if _silent(wrong) or (right.extracted is not None and right.extracted == wrong.extracted):
        return "format"
    return "reasoning"


def _silent(answer: Answer) -> bool:
    return answer.extracted is None or not answer.extracted.strip()


def _unit(first: Evaluation, second: Evaluation) -> str:
    if "choice" in (first.settings.get("kind"), second.settings.get("kind")):
        return "choices"
    ids = all(answer.ids is not None for one in (first, second) for item in one.items for answer in item.answers)
    same = first.settings.get("tokenizer_sha256") == second.settings.get("tokenizer_sha256")
    return "tokens" if ids and same else "characters"


def _sequence(answer: Answer, unit: str) -> Sequence:
    return {"tokens": answer.ids, "characters": answer.text, "choices": [answer.text]}[unit]


def _move(pair: Pair, at: int, unit: str) -> float | None:
    a, b = pair.first.margins, pair.second.margins
    if unit == "characters" or a is None or b is None or at >= min(len(a), len(b)):
        return None
    return a[at] + b[at]


def _moves(first: Evaluation, second: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """(moves, the smaller margin) at every position up to and with the first difference."""
    unit, moves, margins = _unit(first, second), [np.zeros(0)], [np.zeros(0)]
    if unit == "characters":
        return moves[0], margins[0]
    for pair in pairs_of(first, second):
        if pair.first.margins is None or pair.second.margins is None:
            continue
        a, b = (np.asarray(answer.margins, dtype=np.float64) for answer in (pair.first, pair.second))
        at = first_difference(_sequence(pair.first, unit), _sequence(pair.second, unit))
        agree = min(len(a), len(b)) if at is None else min(at, len(a), len(b))
        moves.append(np.abs(a[:agree] - b[:agree]))
        margins.append(np.minimum(a[:agree], b[:agree]))
    return np.concatenate(moves), np.concatenate(margins)


def _bound(measured: tuple[np.ndarray, np.ndarray]) -> float | None:
    moves, margins = measured
    close = moves[margins < CLOSE]
    chosen = close if len(close) >= FEW else moves
    return float(chosen.max()) if len(chosen) else None


def _call(move: float | None, tie_bound: float | None, noise_bound: float | None) -> str:
    """`tie`: rounding could decide either way; `noise`: within this pair's usual noise; `disagreement`: neither."""
    if move is None or (tie_bound is None and noise_bound is None):
        return "unknown"
    if tie_bound is not None and move <= tie_bound:
        return "tie"
    if noise_bound is not None and move <= noise_bound:
        return "noise" if tie_bound is not None else "tie"
    return "disagreement"
