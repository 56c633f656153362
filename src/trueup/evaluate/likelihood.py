"""Multiple choice: every choice's log-likelihood by the engine's prefill, and the answer that has the largest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trueup.evaluate.records import Answer
from trueup.rollouts import Rollouts
from trueup.samplers.base import Sampler
from trueup.tasks.base import Problem
from trueup.tasks.choice import Choice


class Chooser:
    def __init__(
        self,
        sampler: Sampler,
        task: Choice,
        problems: Sequence[Problem],
        encoded: list[list[tuple[list[int], list[int]]]],
    ):
        """encoded: (context ids, choice ids) of every choice of every problem."""
        self.sampler, self.task, self.problems, self.encoded = sampler, task, problems, encoded

    def __call__(self, rows: Sequence[int], seed: int) -> tuple[list[list[Answer]], list[list[int]], int]:
        """(one answer, the context ids) of each row, and how many tokens were scored, contexts included. Nothing is drawn,
        so the seed is no matter."""
        pairs = [pair for row in rows for pair in self.encoded[row]]
        rollouts = Rollouts.from_lists([context for context, _ in pairs], [ids for _, ids in pairs])
        logprobs = self.sampler.score(rollouts)
        scored = [part.tolist() for part in logprobs.split(rollouts.lengths.tolist())]
        answers, at = [], 0
        for row in rows:
            own = scored[at : at + len(self.encoded[row])]
            at += len(own)
            answers.append([self._choose(row, own)])
        tokens = rollouts.tokens + len(rollouts.prompt_ids)
        return answers, [self.encoded[row][0][0] for row in rows], tokens

    def _choose(self, row: int, logprobs: list[list[float]]) -> Answer:
        problem = self.problems[row]
        choices = problem.extra["choices"]
        values = [self.task.likelihood(own, choice) for own, choice in zip(logprobs, choices)]
        if not torch.tensor(values).isfinite().all():
            raise ValueError(
                f"{self.sampler.engine} gave the choices of {str(problem.prompt)[:80]!r} the log-likelihoods {values}"
            )
        best, second = sorted(values, reverse=True)[:2]
        chosen = values.index(best)
        return Answer(
            choices[chosen],
            float(chosen == problem.extra["right"]),
            choices[chosen],
            self.encoded[row][chosen][1],
            None,
            logprobs[chosen],
            [best - second],
        )
