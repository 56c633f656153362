"""What a task is: problems to ask and a verifier that scores an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer."""

    prompt: str | list[dict[str, str]]
    """Plain text, or chat messages (`[{"role": "user", "content": ...}]`) where the question is a conversation."""
    answer: str
    """What the verifier compares a response with."""
    extra: dict = field(default_factory=dict, compare=False)
    """Whatever the verifier needs besides (a reasoning-gym entry, say)."""


class VirtualRows(Sequence):
    """A list of problems that are made when they are asked for: what is common to generated tasks."""

    def __init__(self, length: int):
        self.length = length

    def problem(self, index: int) -> Problem:
        """Problem `index`, 0 <= index < length: a pure function of it."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.problem(i) for i in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(f"problem {index} of {self.length}: ask 0 to {self.length - 1}")
        return self.problem(index % self.length)


class Task(Protocol):
    """Problems are addressed by index, so that a resumed run asks exactly what an uninterrupted one would."""

    name: str
    train: Sequence[Problem]
    heldout: Sequence[Problem]

    def score(self, problem: Problem, response: str) -> float:
        """Reward of a response text (special tokens removed), usually 0.0 or 1.0. Never executes model output."""
        ...
