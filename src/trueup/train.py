"""The loop: sample, score, correct, learn, deliver."""

from __future__ import annotations

import errno
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trueup.advantages import signal_groups
from trueup.config import ConfigError, RunConfig
from trueup.console import RunConsole
from trueup.learner.model import load_tokenizer, resolve, stop_token_ids
from trueup.learner.update import Batch, Learner
from trueup.mismatch import measure
from trueup.rollouts import Rollouts
from trueup.rundir import RunDirectory
from trueup.samplers import Sampler, Sampling, open_sampler
from trueup.samplers.transformers import TransformersSampler
from trueup.sync import Delivery
from trueup.tasks import load_task
from trueup.tasks.base import Problem, Task
from trueup.tasks.prompts import decode_response, encode_prompt
from trueup.tracking import open_trackers


class Trainer:
    """One run. `train()` reads like the algorithm; the rest are its steps."""

    def __init__(self, config: RunConfig, run: RunDirectory, console: RunConsole | None = None):
        self.config = config
        self.run = run
        self.console = console or RunConsole()
        self.step = self.version = 0
        self.task = load_task(config.task, seed=config.seed, heldout=config.log.eval_problems)
        self.tokenizer = load_tokenizer(config.model)
        self.problems = ProblemStream(self.task.train, config.seed)
        self.learner = Learner(config)
        self.stops = stop_token_ids(self.tokenizer, self.learner.policy.model.config)
        self.context = self._context()
        heldout = self.task.heldout[: config.log.eval_problems]
        self.heldout = [(problem, self._prompt(problem)) for problem in heldout]
        self._restore()
        self.sampler = self._open_sampler()
        self.delivery = self._open_delivery()
        self.trackers = open_trackers(config, run.path)

    # --- the algorithm --------------------------------------------------------------------------------------------

    def train(self) -> dict:
        """All remaining steps. Returns the run's summary. SIGINT and SIGTERM end it after the step's write."""
        config = self.config
        first = self.delivery.deliver(self.version)
        self.console.say(f"{config.sampler.spec} holds the learner's weights: canary KL {first.get('delivery/canary_kl', 0):.1e}")
        if self.step == 0 and not self.run.metrics():
            self.start_accuracy = self.evaluate()
            self.console.say(f"held-out accuracy before training: {self.start_accuracy:.1%}")
        self.console.start(self.step, config.steps)
        with _Interrupt() as interrupted:
            while self.step < config.steps and not interrupted.signal:
                begin = time.perf_counter()
                self.step += 1
                rollouts, metrics = self.collect()
                batch, scored = self.learner.prepare(rollouts)
                updated = self.learner.update(batch, self._generator(), learn_policy=self.step > config.critic.warmup_rollouts)
                metrics |= scored | updated | self.statistics(batch)
                if self.step % config.delivery.every == 0:
                    self.version = self.step
                    metrics |= self.delivery.deliver(self.version)
                metrics |= self._pace(metrics, batch.rollouts, time.perf_counter() - begin)
                self._write(metrics, batch.rollouts, stopping=bool(interrupted.signal))
        self.console.stop()
        if interrupted.signal:
            self.console.say(
                f"stopped by {interrupted.signal} after step {self.step}; continue with: "
                f"trueup train --resume --out {self.run.path}"
            )
        return self.summary(interrupted.signal)

    def collect(self) -> tuple[Rollouts, dict[str, float]]:
        """A batch of judged rollouts. With dynamic sampling, groups without signal are replaced by others."""
        config, begin = self.config, time.perf_counter()
        kept: list[Rollouts] = []
        drawn_rewards, missing = [], config.batch.prompts
        refills = config.reward.max_refills if config.reward.dynamic_sampling else 0
        for refill in range(refills + 1):
            # About half of the groups have no signal where dynamic sampling pays, so a refill asks for twice what it lacks.
            asked = min(config.batch.prompts, missing * (2 if refill else 1))
            seed = (config.seed * 10_007 + self.step) * 64 + refill
            rollouts = self._sample(self.problems.take(asked), config.sampling(self.stops, seed=seed))
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
        rollouts.step[:] = self.step
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

    def _sample(self, problems: Sequence[Problem], sampling: Sampling) -> Rollouts:
        rollouts = self.sampler.generate([self._prompt(problem) for problem in problems], sampling)
        rollouts.reward = self._rewards(self.task, problems, rollouts)
        return rollouts

    def _rewards(self, task: Task, problems: Sequence[Problem], rollouts: Rollouts) -> torch.Tensor:
        rewards = []
        for row, group in enumerate(rollouts.group.tolist()):
            text = decode_response(rollouts.response(row).tolist(), self.tokenizer)
            reward = task.score(problems[group], text)
            if reward != reward:
                raise ValueError(
                    f"task {task.name} scored a response NaN: {text!r} to {problems[group].prompt!r}; "
                    "its verifier must return a number"
                )
            rewards.append(reward)
        return torch.tensor(rewards, dtype=torch.float32)

    def statistics(self, batch: Batch) -> dict[str, float]:
        """The mismatch before any correction, and where the sampler's weights stood."""
        rollouts = batch.rollouts
        rollouts.learner_version[:] = self.step - 1  # scored before this step's update
        begin = time.perf_counter()
        found = measure(
            rollouts.sampler_logprobs, rollouts.learner_logprobs, rollouts.offsets, rollouts.loss_mask, batch.entropy
        )
        staleness = (self.step - 1 - rollouts.sampler_version).float().mean()
        return found | {
            "policy/entropy": float(batch.entropy[rollouts.loss_mask].mean()),
            "staleness/mean": float(staleness),
            "time/measure": time.perf_counter() - begin,
        }

    def evaluate(self) -> float:
        """Held-out greedy accuracy of the learner's own weights, by the reference engine in the learner's precision."""
        dtype = self.config.learner.dtype
        model = self.learner.policy.model
        reference = TransformersSampler(model, dtype, context=self.context, token_budget=self.config.learner.token_budget * 2)
        sampling = Sampling(max_tokens=self.config.batch.response_length, stop_token_ids=self.stops, temperature=0)
        model.eval()
        rollouts = reference.generate([prompt for _, prompt in self.heldout], sampling)
        model.train()
        return float(self._rewards(self.task, [problem for problem, _ in self.heldout], rollouts).mean())

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _write(self, metrics: dict[str, float], rollouts: Rollouts, stopping: bool) -> None:
        log, last = self.config.log, self.step == self.config.steps
        due = lambda every: every and self.step % every == 0  # noqa: E731
        if last or due(log.eval_every):
            metrics["eval/accuracy"] = self.evaluate()
        row = {"step": self.step, "version": self.version} | metrics
        if due(log.rollouts_every):
            self.run.write_rollouts(self.step, rollouts)
        self.run.append_metrics(row)
        if last or stopping or due(log.checkpoint_every):
            self._save()
        for track in self.trackers:
            track(self.step, metrics)
        self.console.step(row)

    def _save(self) -> None:
        tensors = self.learner.state() | {f"delivery/{name}": value for name, value in self.delivery.state().items()}
        state = {"step": self.step, "version": self.version, "problems_taken": self.problems.taken}
        model = self.learner.policy.model
        self.run.save_checkpoint(self.step, model, self.tokenizer, tensors, state, self.config.log.keep_checkpoints)

    def _restore(self) -> None:
        self._delivery_state: dict[str, torch.Tensor] = {}
        found = self.run.load_checkpoint()
        if found is None:
            self.run.rewind(0)
            return
        folder, tensors, state = found
        self.step, self.version, self.problems.taken = state["step"], state["version"], state["problems_taken"]
        self.learner.load_state(tensors)
        prefix = "delivery/"
        self._delivery_state = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        self.run.rewind(self.step)
        self.console.say(f"resuming after step {self.step} from {folder}")

    def _open_sampler(self) -> Sampler:
        sampler, options = self.config.sampler, {}
        if sampler.engine == "vllm":
            options = dict(
                kv_cache_gib=sampler.kv_cache_gib,
                gpu_memory=sampler.gpu_memory,
                max_sequences=sampler.max_sequences,
                seed=self.config.seed,
            )
        self.console.say(f"starting {sampler.spec}")
        return open_sampler(sampler.spec, resolve(self.config.model), context=self.context, **options)

    def _open_delivery(self) -> Delivery:
        settings = self.config.delivery
        prompts = [self._prompt(self.task.train[row]) for row in range(min(settings.canary_sequences, len(self.task.train)))]
        delivery = Delivery(
            self.learner.policy,
            self.sampler,
            prompts,
            context=self.context,
            stop_token_ids=self.stops,
            tokens=settings.canary_tokens,
            prove=settings.prove,
        )
        delivery.load_state(self._delivery_state)
        return delivery

    def _context(self) -> int:
        context = self.config.batch.prompt_length + self.config.batch.response_length
        limit = getattr(self.learner.policy.model.config.get_text_config(), "max_position_embeddings", None)
        if limit and context > limit:
            raise ConfigError(
                f"batch.prompt_length {self.config.batch.prompt_length} + batch.response_length "
                f"{self.config.batch.response_length} = {context} tokens, but {self.config.model} reads at most {limit}; lower one"
            )
        return context

    def _prompt(self, problem: Problem) -> list[int]:
        ids = encode_prompt(problem, self.tokenizer)
        if len(ids) > self.config.batch.prompt_length:
            raise ConfigError(
                f"a prompt of {self.task.name} has {len(ids)} tokens, batch.prompt_length is {self.config.batch.prompt_length}: "
                f"raise it, or shorten the prompt. It begins {str(problem.prompt)[:80]!r}"
            )
        return ids

    def _generator(self) -> torch.Generator:
        """Of the step's minibatches: a function of seed and step, so that a resumed run shuffles alike."""
        return torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)

    def _pace(self, metrics: dict, rollouts: Rollouts, seconds: float) -> dict[str, float]:
        tokens = rollouts.tokens
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/rollout_tokens_per_second": tokens / metrics["time/rollout"],
            "memory/peak_bytes": peak * (1 if sys.platform == "darwin" else 1024),
        }

    def summary(self, stopped_by: str | None = None) -> dict:
        rows = self.run.metrics()
        accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        return {
            "run": str(self.run.path),
            "steps": self.step,
            "stopped_by": stopped_by,
            "sampler": self.config.sampler.spec,
            "accuracy_before": getattr(self, "start_accuracy", None),
            "accuracy_after": accuracies[-1] if accuracies else None,
            "last": rows[-1] if rows else None,
        }

    def close(self) -> None:
        self.sampler.close()
        self.run.close()


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


class _Interrupt:
    """Turns the first SIGINT or SIGTERM into a note to stop after the step; the second SIGINT stops at once."""

    def __enter__(self):
        self.signal: str | None = None
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        self.signal = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(config: RunConfig, out: str | Path, resume: bool = False, console: RunConsole | None = None) -> dict:
    """Run a configuration in the folder `out` and return its summary; `resume` continues what the folder holds."""
    if resume:
        run, config = RunDirectory.reopen(out)
    else:
        run = RunDirectory.create(out, config)
    try:
        trainer = Trainer(config, run, console)
        try:
            return trainer.train()
        finally:
            trainer.close()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC, f"the disk that holds {run.path} is full; free space and continue with: "
                f"trueup train --resume --out {run.path}"
            ) from error
        raise
    finally:
        run.close()
