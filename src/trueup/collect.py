"""Collecting a batch: problems are asked, responses sampled and judged."""

from __future__ import annotations

import time
from collections.abc import Sequence

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
        self.problems = ProblemStream(self.task.train, config.seed)
        self.heldout = list(self.task.heldout[: config.log.eval_problems])
        for problem in self.heldout:
            self.prompt(problem)  # too long a prompt is better found now than at the first evaluation

    def batch(self, sampler: Sampler, step: int) -> tuple[Rollouts, dict[str, float]]:
        """The step's judged rollouts, and `reward/`, `response/` and `time/rollout` metrics.

        With dynamic sampling, groups without signal are replaced by others.
        """
        config, begin = self.config, time.perf_counter()
        kept: list[Rollouts] = []
        drawn_rewards, missing = [], config.batch.prompts
        refills = config.reward.max_refills if config.reward.dynamic_sampling else 0
        for refill in range(refills + 1):
            # About half of the groups have no signal where dynamic sampling pays, so a refill asks for twice what it lacks.
            asked = min(config.batch.prompts, missing * (2 if refill else 1))
            seed = (config.seed * 10_007 + step) * 64 + refill
            rollouts = self._sample(sampler, self.problems.take(asked), config.sampling(self.stops, seed=seed))
            drawn_rewards.append(rollouts.reward)
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
        rollouts = Rollouts.concat(kept)
        rollouts.group = torch.arange(len(rollouts), dtype=torch.int32) // config.batch.samples
        rollouts.step[:] = step
        rewards = torch.cat(drawn_rewards)
        truncated = sum(reason == "length" for reason in rollouts.finish_reason)
        return rollouts, {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            "reward/signal_fraction": float(signal_groups(rollouts.reward, rollouts.group).float().mean()),
            "response/length_mean": float(rollouts.lengths.float().mean()),
            "response/truncated_fraction": truncated / len(rollouts),
            "time/rollout": time.perf_counter() - begin,
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
        learner = self.config.learner
        reference = TransformersSampler(
            model, learner.dtype, context=self.context, token_budget=2 * learner.token_budget
        )
        greedy = Sampling(max_tokens=self.config.batch.response_length, stop_token_ids=self.stops, temperature=0)
        model.eval()
        rollouts = self._sample(reference, self.heldout, greedy)
        model.train()
        return float(rollouts.reward.mean())

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
        """Prompts of the first training problems, as ids."""
        return [self.prompt(self.task.train[row]) for row in range(min(count, len(self.task.train)))]


class ProblemStream:
    """Training problems in a seeded order, epoch after epoch; its whole state is how many were taken."""

    def __init__(self, problems: Sequence[Problem], seed: int):
        self.problems = problems
        self.seed = seed
        self.taken = 0
        self._epoch, self._order = -1, None

    def take(self, count: int) -> list[Problem]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Problem:
        epoch, place = divmod(self.taken, len(self.problems))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.problems), generator=generator)
        self.taken += 1
        return self.problems[int(self._order[place])]
