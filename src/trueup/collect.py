"""Collecting a batch: problems are asked, responses sampled and judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from trueup.advantages import signal_groups
from trueup.config import ConfigError, RunConfig
from trueup.rollouts import Rollouts
from trueup.samplers import Sampler, Sampling
from trueup.samplers.transformers import TransformersSampler
from trueup.tasks import load_task
from trueup.tasks.base import Problem
from trueup.tasks.prompts import decode_response, encode_prompt


class Collector:
    """The task at work: which problems come next, as which ids, and what the responses score."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...], context: int):
        """stops: ids that end a response. context: longest prompt plus response, tokens."""
        self.config = config
        self.tokenizer = tokenizer
        self.stops = stops
        self.context = context
        self.task = load_task(config.task, seed=config.seed, heldout=config.log.eval_problems)
        self.problems = ProblemStream(self.task.train, config.seed, self.fits)
        self.heldout = list(self.task.heldout[: config.log.eval_problems])
        for problem in self.heldout:
            self.prompt(problem)  # too long a prompt is better found now than at the first evaluation

    def batch(self, sampler: Sampler, step: int) -> tuple[Rollouts, dict[str, float]]:
        """The step's judged rollouts, and `reward/`, `response/` and `time/rollout` metrics.

        With dynamic sampling, groups without signal are replaced by others.
        """
        config, begin = self.config, time.perf_counter()
        kept: list[Rollouts] = []
        drawn: list[Rollouts] = []
        missing, skipped_before = config.batch.prompts, self.problems.skipped
        refills = config.reward.max_refills if config.reward.dynamic_sampling else 0
        for refill in range(refills + 1):
            # About half of the groups have no signal where dynamic sampling pays, so a refill asks for twice what it lacks.
            asked = min(config.batch.prompts, missing * (2 if refill else 1))
            seed = (config.seed * 10_007 + step) * 64 + refill
            rollouts = self._sample(sampler, self.problems.take(asked), config.sampling(self.stops, seed=seed))
            rollouts.group += refill * config.batch.prompts
            drawn.append(rollouts)
            if refills:
                useful = signal_groups(rollouts.reward, rollouts.group)
                # Groups with signal first; the last round fills the batch with others rather than leave it short.
                order = torch.argsort((~useful).int(), stable=True)
                most = len(rollouts) if refill == refills else int(useful.sum())
                rollouts = rollouts.rows(order[: min(most, missing * config.batch.samples)])
            kept.append(rollouts)
            missing -= len(rollouts) // config.batch.samples
            if missing == 0:
                break
        rollouts, drawn_rollouts = Rollouts.concat(kept), Rollouts.concat(drawn)
        rollouts.group = torch.arange(len(rollouts), dtype=torch.int32) // config.batch.samples
        rollouts.step[:] = step
        metrics = _describe(drawn_rollouts) | {"reward/prompts_skipped": self.problems.skipped - skipped_before}
        seconds = time.perf_counter() - begin
        return rollouts, metrics | {
            "time/rollout": seconds,
            "throughput/rollout_tokens_per_second": drawn_rollouts.tokens / seconds,
        }

    def _sample(self, sampler: Sampler, problems: Sequence[Problem], sampling: Sampling) -> Rollouts:
        rollouts = sampler.generate([self.prompt(problem) for problem in problems], sampling)
        rollouts.reward = self._judge(problems, rollouts)
        return rollouts

    def _judge(self, problems: Sequence[Problem], rollouts: Rollouts) -> torch.Tensor:
        rewards = []
        for row, group in enumerate(rollouts.group.tolist()):
            text = decode_response(rollouts.response(row).tolist(), self.tokenizer)
            reward = self.task.score(problems[group], text)
            if reward != reward:
                raise ValueError(
                    f"task {self.task.name} scored a response NaN: {text!r} to {problems[group].prompt!r}; "
                    "its verifier must return a number"
                )
            rewards.append(reward)
        return torch.tensor(rewards, dtype=torch.float32)

    def accuracy(self, model: nn.Module) -> float:
        """Held-out greedy accuracy of the learner's own weights, by the reference engine in the learner's precision."""
        reference = TransformersSampler(model, self.config.learner.dtype, context=self.context)
        before = model.training
        model.eval()  # with gradient checkpointing, transformers keeps no cache in training mode
        try:
            return self.accuracy_of(reference)
        finally:
            model.train(before)

    def accuracy_of(self, sampler: Sampler) -> float:
        """Held-out greedy accuracy of what the sampler holds."""
        greedy = Sampling(max_tokens=self.config.batch.response_length, stop_token_ids=self.stops, temperature=0)
        return float(self._sample(sampler, self.heldout, greedy).reward.mean())

    def fits(self, problem: Problem) -> bool:
        """Whether its prompt is within batch.prompt_length."""
        return len(encode_prompt(problem, self.tokenizer)) <= self.config.batch.prompt_length

    def prompt(self, problem: Problem) -> list[int]:
        """Its ids. Raises ConfigError if they do not fit in batch.prompt_length."""
        ids = encode_prompt(problem, self.tokenizer)
        if len(ids) > self.config.batch.prompt_length:
            raise ConfigError(
                f"a prompt of {self.task.name} has {len(ids)} tokens, batch.prompt_length is {self.config.batch.prompt_length}: "
                f"raise it, or shorten the prompt. It begins {str(problem.prompt)[:80]!r}"
            )
        return ids

    def examples(self, count: int) -> list[list[int]]:
        """Prompts of the first training problems that fit, as ids."""
        stream = ProblemStream(self.task.train, self.config.seed, self.fits)
        return [self.prompt(problem) for problem in stream.take(min(count, len(self.task.train)))]


def _describe(drawn: Rollouts) -> dict[str, float]:
    """Of all responses drawn, also those that dynamic sampling then leaves out."""
    return {
        "reward/mean": float(drawn.reward.mean()),
        "reward/std": float(drawn.reward.std(correction=0)),
        "reward/signal_fraction": float(signal_groups(drawn.reward, drawn.group).float().mean()),
        "response/length_mean": float(drawn.lengths.float().mean()),
        "response/truncated_fraction": drawn.finish_reason.count("length") / len(drawn),
    }


class ProblemStream:
    """Training problems in a seeded order, epoch after epoch; its whole state is how many were taken.

    Problems that do not fit are left out and counted: cut in silence they would be other problems.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, fits: Callable[[Problem], bool] = lambda problem: True):
        self.problems = problems
        self.seed = seed
        self.fits = fits
        self.taken = 0
        self.skipped = 0
        self._epoch, self._order = -1, None

    def take(self, count: int) -> list[Problem]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Problem:
        for _ in range(min(len(self.problems), 10_000)):
            problem = self._at(self.taken)
            self.taken += 1
            if self.fits(problem):
                return problem
            self.skipped += 1
        raise ConfigError(
            f"no prompt of {min(len(self.problems), 10_000)} training problems in a row fits into batch.prompt_length: raise it. "
            f"The last begins {str(problem.prompt)[:80]!r}"
        )

    def _at(self, place: int) -> Problem:
        epoch, place = divmod(place, len(self.problems))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.problems), generator=generator)
        return self.problems[int(self._order[place])]
