"""The responses that disagree most, kept while a dump streams by."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from trueup.rollouts import Rollouts


@dataclass
class Response:
    """One response with everything the page shows of it."""

    place: str
    """File and row, for finding it again."""
    prompt_ids: list[int]
    ids: list[int]
    sampler: np.ndarray
    """log mu of each token, NaN where missing."""
    learner: np.ndarray
    chosen: np.ndarray
    """Loss mask."""
    step: int
    reward: float
    finish_reason: str
    engine: str
    copies: int = 1
    """Responses with the same prompt and tokens: a group that agrees would fill the list with one finding."""

    @property
    def log_rho(self) -> np.ndarray:
        """NaN where a token is not measured: missing, or not chosen by the policy."""
        with np.errstate(invalid="ignore"):
            difference = self.learner - self.sampler
        return np.where(self.chosen & np.isfinite(difference), difference, np.nan)

    def same_text(self, other: Response) -> bool:
        return self.ids == other.ids and self.prompt_ids == other.prompt_ids

    @property
    def total(self) -> float:
        return float(np.nansum(np.abs(self.log_rho)))

    @property
    def peak(self) -> int:
        """Position, from 0, of the token with the largest |log rho|."""
        return int(np.nanargmax(np.abs(self.log_rho)))


class Worst:
    """The `keep` responses with the largest score."""

    def __init__(self, keep: int):
        self.keep = keep
        self._heap: list[tuple[float, int, Response]] = []
        self._order = itertools.count()

    def add(self, score_B: np.ndarray, rollouts: Rollouts, place: str, first_row: int) -> None:
        """Responses of one batch; a score that is not positive is of no interest."""
        for row in np.argsort(-score_B, kind="stable"):
            score = float(score_B[row])
            if score <= 0 or (len(self._heap) == self.keep and score < self._heap[0][0]):
                return
            response = _response(rollouts, int(row), f"{place}, row {first_row + row}")
            same = next((entry for entry in self._heap if entry[2].same_text(response)), None)
            if same and score <= same[0]:
                same[2].copies += 1
                continue
            if same:
                response.copies += same[2].copies
                self._heap.remove(same)
                heapq.heapify(self._heap)
            entry = (score, -next(self._order), response)
            (heapq.heappushpop if len(self._heap) == self.keep else heapq.heappush)(self._heap, entry)

    def responses(self) -> list[Response]:
        """Worst first."""
        return [entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _response(rollouts: Rollouts, row: int, place: str) -> Response:
    tokens = slice(int(rollouts.offsets[row]), int(rollouts.offsets[row + 1]))
    return Response(
        place=place,
        prompt_ids=rollouts.prompt(row).tolist(),
        ids=rollouts.response(row).tolist(),
        sampler=rollouts.sampler_logprobs[tokens].numpy().astype(float),
        learner=rollouts.learner_logprobs[tokens].numpy().astype(float),
        chosen=rollouts.loss_mask[tokens].numpy().copy(),
        step=int(rollouts.step[row]),
        reward=float(rollouts.reward[row]),
        finish_reason=rollouts.finish_reason[row],
        engine=rollouts.engine[row],
    )
