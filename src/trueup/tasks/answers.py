"""Finding the final answer in a response and judging it. Text in, verdict out; nothing here runs what a model wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from trueup.tasks.equivalence import equivalent

MAX_LENGTH = 500
"""Characters of an answer. Longer ones are not answers but reasoning, and every step below stays fast."""

CURRENCY = r"(?:\\?\$|[€£¥])?"
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*{CURRENCY}\s*(?P<value>{DIGITS})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?"
    rf"(?:\s*/\s*(?P<divisor>{DIGITS}))?(?P<percent>\s*\\?%|\s+percent\b)?(?:\s+(?P<unit>[A-Za-z]{{3}}[A-Za-z .]*))?"
)
FRACTION = re.compile(r"(-?)\s*\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
FACTORS = re.compile(r"(?:hundred|thousand|million|billion|trillion|dozen|half|times|sqrt)", re.IGNORECASE)
"""Words after a number that change its value, unlike a unit."""

TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
COMMAND = re.compile(r"\\(?:begin|end|operatorname)\{[A-Za-z]+\*?\}|\\[A-Za-z]+")
WORD = re.compile(r"[^\W\d_]{3}")
SYMBOL = re.compile(r"[0-9\\+\-*/^=<>(){}\[\]|,]")


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    def __eq__(self, other) -> bool:
        """Same value; 50% is both 50 (the unit left out) and 0.5. Units count only where both have one."""
        if not isinstance(other, Number):
            return NotImplemented
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.value == other.value:
            return True
        share, plain = (self, other) if self.percent else (other, self)
        return share.percent and not plain.percent and share.value / 100 == plain.value

    __hash__ = None  # equality is not transitive (50 == 50% == 0.5), so there is nothing to hash by


def hashed_answer(response: str) -> str | None:
    """What follows the last `####`, to the end of its line; None without one."""
    at = response.rfind("####")
    return None if at < 0 else response[at + 4 :].split("\n", 1)[0].strip()


def boxed_answer(response: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None without one, or where it is not closed."""
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for at in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[at], 0)
        if depth == 0:
            return response[start:at].strip()
    return None


def tagged_answer(response: str) -> str | None:
    """What the last `<answer>...</answer>` holds; None without one."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return None if end < 0 or start < 0 else response[start + len("<answer>") : end].strip()


def final_answer(text: str) -> str:
    r"""The answer that a text ends in: the last of `#### ...`, `\boxed{...}` and `<answer>...</answer>`, or all of it."""
    marks = {"####": hashed_answer, "\\boxed{": boxed_answer, "</answer>": tagged_answer}
    for mark in sorted(marks, key=text.rfind, reverse=True):
        answer = marks[mark](text)
        if answer is not None:
            return answer
    return text.strip()


def read_number(text: str) -> Number | None:
    """The number that a text is, whole: `1,000`, `$5.00`, `-3`, `1/2`, `50%`, `18 dollars`. None for anything else."""
    if len(text) > MAX_LENGTH:
        return None
    text = _clean(text)
    # A minus sign may stand before or after the currency; one place is enough to look for it.
    text = re.sub(r"^(\\?\$|[€£¥])\s*([-+])", r"\2\1", text)
    if match := FRACTION.fullmatch(text):
        text = f"{match[1]}{match[2]}/{match[3]}"
    match = NUMBER.fullmatch(text)
    if match is None or (match["unit"] and FACTORS.match(match["unit"])):
        return None
    value = _fraction(match["value"]) * Fraction(10) ** int(match["exponent"] or 0)
    if match["divisor"]:
        divisor = _fraction(match["divisor"])
        if divisor == 0:
            return None
        value /= divisor
    unit = (match["unit"] or "").strip(" .").lower().removesuffix("s")
    return Number(-value if match["sign"] == "-" else value, percent=bool(match["percent"]), unit=unit)


def same_answer(gold: str, answer: str) -> bool:
    """Whether an answer means the same as the reference: as text, as a number, or as a formula. Never raises.

    Two numbers are compared exactly. math-verify is asked only where at least one side is more than a number and both
    look like mathematics: it reads a word as a product of letters, and would call "pairs" and "Paris" the same.
    """
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    gold, answer = _clean(gold), _clean(answer)
    if not gold or not answer:
        return False
    if " ".join(gold.casefold().split()) == " ".join(answer.casefold().split()):
        return True
    gold_number, answer_number = read_number(gold), read_number(answer)
    if gold_number is not None and answer_number is not None:
        return gold_number == answer_number
    return _is_formula(gold) and _is_formula(answer) and equivalent(gold, answer)


def _clean(text: str) -> str:
    """Without what surrounds an answer and does not change it: emphasis, math delimiters, a final period."""
    text = TEXT_COMMAND.sub(r" \1", text).replace("−", "-").replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    before = None
    while text != before:
        before = text
        text = text.strip().removesuffix(".").strip("*").strip()
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                text = text[len(opening) : len(text) - len(closing)]
    return text


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _is_formula(text: str) -> bool:
    return bool(SYMBOL.search(text)) and not WORD.search(COMMAND.sub(" ", text))
