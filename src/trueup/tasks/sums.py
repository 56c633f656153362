"""The embedded task: sums of several numbers, worked out step by step.

    prompt    17+25+23+40=
    response  17+25=42;42+23=65;65+40=105;#105

The verifier reads only the number after `#`; the running totals are the model's own reasoning, and nobody grades them.
Nothing is stored: problem i of a split is a pure function of (seed, split, i).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence

from trueup.tasks.base import Problem, VirtualRows

SPLITS = ("train", "heldout")
TRAIN_ROWS = 1_000_000
HELDOUT_SHARE = 8
"""One problem in this many is held out. A share of the *problems*, not of the rows asked."""

FINAL = re.compile(r"[^#]*#(-?[0-9]+)", re.DOTALL)
PARAMETER = re.compile(r"([a-z]+)=([0-9]+)")


def is_heldout(prompt: str) -> bool:
    """Which split a problem belongs to, decided by its text alone.

    Independent of the seed, so no train problem of any seed equals a held-out problem of any other: a model taught with
    one seed may be evaluated with another.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


def work_out(addends: Sequence[int], add: Callable[[int, int], int] = int.__add__) -> str:
    """The response that adds from left to right; `add` is how one step is computed."""
    total, steps = addends[0], []
    for addend in addends[1:]:
        result = add(total, addend)
        steps.append(f"{total}+{addend}={result};")
        total = result
    return f"{''.join(steps)}#{total}"


class Rows(VirtualRows):
    """Problems of one split."""

    def __init__(self, split: str, length: int, seed: int, addends: int, digits: int):
        super().__init__(length)
        self.split, self.seed, self.addends, self.digits = split, seed, addends, digits

    def problem(self, index: int) -> Problem:
        numbers = self.numbers(index)
        return Problem(prompt=_prompt(numbers), answer=str(sum(numbers)))

    def numbers(self, index: int) -> list[int]:
        """The addends of problem `index`: drawn until they fall into this split (8/7 draws on average, or 8)."""
        rng = random.Random(f"sums/{self.seed}/{self.split}/{self.addends}/{self.digits}/{index}")
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        while True:
            numbers = [rng.randint(low, high) for _ in range(self.addends)]
            if is_heldout(_prompt(numbers)) == (self.split == "heldout"):
                return numbers


class Sums:
    """Sums of `addends` numbers of exactly `digits` digits each."""

    name = "sums"

    def __init__(self, seed: int = 0, heldout: int = 512, addends: int = 4, digits: int = 2):
        """
        seed: which train problems are drawn. The held-out ones are the same for every seed, so that runs of several
            seeds are compared on one set; no train problem of any seed is among them.
        heldout: rows of the held-out split. 512 puts the standard error of an accuracy at 2 points or less.
        addends: 4 gives three steps of work, 30 tokens: long enough that a wrong token early on costs the reward,
            short enough that a training step on two cores takes seconds.
        digits: 2, so that every step may carry. All addends have the same number of digits: equal prompts, no padding.
        """
        for name, value, low, high in (("addends", addends, 2, 64), ("digits", digits, 1, 18)):
            if not low <= value <= high:
                raise ValueError(
                    f"sums: {name}={value} is not in {low}..{high}; the default is sums:addends=4,digits=2"
                )
        if addends * digits < 3:
            raise ValueError(
                f"sums: addends={addends},digits={digits} has too few problems to hold some out; "
                "take at least three addends or two digits"
            )
        if heldout < 1:
            raise ValueError(f"sums: heldout={heldout} leaves nothing to evaluate; give 1 or more rows (default 512)")
        self.train = Rows("train", TRAIN_ROWS, seed, addends, digits)
        self.heldout = Rows("heldout", heldout, 0, addends, digits)

    def score(self, problem: Problem, response: str) -> float:
        """1.0 if exactly one `#` is there, with exactly the right number after it and nothing else; 0.0 otherwise."""
        return float(self.extract(response) == problem.answer)

    def extract(self, response: str) -> str | None:
        """The answer that `score` judges; None where the response is not of its form."""
        match = FINAL.fullmatch(response)
        return match[1] if match else None


def from_spec(spec: str, seed: int = 0, heldout: int = 512) -> Sums:
    """`sums`, or `sums:addends=4,digits=2` with either parameter."""
    name, _, parameters = spec.partition(":")
    if name != "sums":
        raise ValueError(f"task {spec!r} is not a sums task; write sums or sums:addends=4,digits=2")
    given = {}
    for part in parameters.split(",") if parameters else ():
        match = PARAMETER.fullmatch(part.strip())
        if match is None or match[1] not in ("addends", "digits"):
            raise ValueError(
                f"task {spec!r}: {part!r} is not a parameter of sums; "
                "write addends=<count> or digits=<count>, as in sums:addends=4,digits=2"
            )
        if match[1] in given:
            raise ValueError(f"task {spec!r}: {match[1]} is given twice; keep one of them")
        given[match[1]] = int(match[2])
    return Sums(seed=seed, heldout=heldout, **given)


def _prompt(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers)) + "="
