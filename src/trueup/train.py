"""The loop: sample, score, correct, learn, deliver."""

from __future__ import annotations

import errno
import resource
import sys
import time
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from trueup.collect import Collector
from trueup.config import ConfigError, RunConfig
from trueup.console import RunConsole
from trueup.interrupt import Interrupt
from trueup.learner.model import load_tokenizer, model_config, resolve, stop_token_ids
from trueup.learner.update import Batch, Learner
from trueup.mismatch import measure
from trueup.rollouts import Rollouts
from trueup.rundir import RunDirectory
from trueup.samplers import Sampler, open_sampler, require_vllm
from trueup.sync import Delivery
from trueup.tracking import open_trackers


class Trainer:
    """One run. `train()` reads like the algorithm; the rest are its steps."""

    def __init__(self, config: RunConfig, run: RunDirectory, console: RunConsole | None = None):
        self.config = config
        self.run = run
        self.console = console or RunConsole()
        self.step = self.version = 0
        self.accuracy_before: float | None = None
        model_config(config.model)
        if config.sampler.engine == "vllm":
            require_vllm()  # a missing engine is better found before the models are loaded
        self.tokenizer = load_tokenizer(config.model)
        self.trackers = open_trackers(config, run.path)
        self.learner = Learner(config)
        self.model = self.learner.policy.model
        self.stops = stop_token_ids(self.tokenizer, self.model)
        self.context = self._context()
        self.collector = Collector(config, self.tokenizer, self.stops, self.context)
        self._restore()
        self.sampler = self._open_sampler()
        self.delivery = self._open_delivery()

    # --- the algorithm --------------------------------------------------------------------------------------------

    def train(self) -> dict:
        """All remaining steps. Returns the run's summary. SIGINT and SIGTERM end it after the step's write."""
        config = self.config
        first = self._deliver()
        self.console.say(
            f"{config.sampler.spec} holds the learner's weights: canary KL {first.get('delivery/canary_kl', 0):.1e}"
        )
        if self.step == 0:
            self.accuracy_before = self.evaluate()
            self.console.say(f"held-out accuracy before training: {self.accuracy_before:.1%}")
        self.console.start(self.step, config.steps)
        saved = self.step
        with Interrupt() as interrupted:
            while self.step < config.steps and not interrupted.signal:
                begin = time.perf_counter()
                self.step += 1
                rollouts, metrics = self.collector.batch(self.sampler, self.step)
                batch, scored = self.learner.prepare(rollouts)
                updated = self.learner.update(
                    batch, self._generator(), learn_policy=self.step > config.critic.warmup_rollouts
                )
                metrics |= scored | updated | self.statistics(batch)
                if self.step % config.delivery.every == 0:
                    self.version = self.step
                    metrics |= self._deliver()
                metrics |= self._pace(batch.rollouts.tokens, time.perf_counter() - begin)
                saved = self._write(metrics, batch.rollouts) or saved
            if saved != self.step:  # stopped between checkpoints
                self._save()
        if interrupted.signal:
            self.console.say(
                f"stopped by {interrupted.signal} after step {self.step}; continue with: "
                f"trueup train --resume --out {self.run.path}"
            )
        return self.summary(interrupted.signal)

    def statistics(self, batch: Batch) -> dict[str, float]:
        """The mismatch before any correction, and where the sampler's weights stood."""
        rollouts = batch.rollouts
        rollouts.learner_version[:] = self.version  # scored with the weights that were delivered
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

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _deliver(self) -> dict[str, float]:
        if self.config.delivery.every > 1:
            self.learner.keep_delivered()
        return self.delivery.deliver(self.version)

    def evaluate(self) -> float:
        if self.config.log.eval_by == "sampler":
            return self.collector.accuracy_of(self.sampler)
        return self.collector.accuracy(self.model)

    def _write(self, metrics: dict[str, float], rollouts: Rollouts) -> int | None:
        """Everything that a step leaves on disk. Returns the step if a checkpoint was saved."""
        log, last = self.config.log, self.step == self.config.steps
        due = lambda every: every and self.step % every == 0  # noqa: E731
        if last or due(log.eval_every):
            metrics["eval/accuracy"] = self.evaluate()
        row = {"step": self.step, "version": self.version} | metrics
        if due(log.rollouts_every):
            self.run.write_rollouts(self.step, rollouts)
        self.run.append_metrics(row)
        for track in self.trackers:
            track(self.step, metrics)
        self.console.step(row)
        if last or due(log.checkpoint_every):
            self._save()
            return self.step
        return None

    def _save(self) -> None:
        tensors = self.learner.state() | {f"delivery/{name}": value for name, value in self.delivery.state().items()}
        state = {
            "step": self.step,
            "version": self.version,
            "problems_taken": self.collector.problems.taken,
            "accuracy_before": self.accuracy_before,
        }
        self.run.save_checkpoint(
            self.step, self.model, self.tokenizer, tensors, state, self.config.log.keep_checkpoints
        )

    def _restore(self) -> None:
        self._delivery_state: dict[str, torch.Tensor] = {}
        found = self.run.load_checkpoint()
        if found is None:
            self.run.rewind(0)
            return
        folder, tensors, state = found
        self.step, self.version, self.accuracy_before = state["step"], state["version"], state["accuracy_before"]
        self.collector.problems.taken = state["problems_taken"]
        self.learner.load_state(tensors)
        prefix = "delivery/"
        self._delivery_state = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        if self.version != self.step:
            self.version = self.step
            self.console.say(
                "stopped between deliveries: the sampler now gets this step's weights, earlier than planned"
            )
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
                activation_range=sampler.activation_range,
            )
        self.console.say(f"starting {sampler.spec}")
        return open_sampler(sampler.spec, resolve(self.config.model), context=self.context, **options)

    def _open_delivery(self) -> Delivery:
        settings = self.config.delivery
        delivery = Delivery(
            self.learner.policy,
            self.sampler,
            self.collector.examples(settings.canary_sequences),
            context=self.context,
            stop_token_ids=self.stops,
            tokens=settings.canary_tokens,
            prove=settings.prove,
            frozen_scales=settings.scales == "frozen",
        )
        delivery.load_state(self._delivery_state)
        return delivery

    def _context(self) -> int:
        context = self.config.batch.prompt_length + self.config.batch.response_length
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit and context > limit:
            raise ConfigError(
                f"batch.prompt_length {self.config.batch.prompt_length} + batch.response_length "
                f"{self.config.batch.response_length} = {context} tokens, but {self.config.model} reads at most {limit}; lower one"
            )
        return context

    def _generator(self) -> torch.Generator:
        """Of the step's minibatches: a function of seed and step, so that a resumed run shuffles alike."""
        return torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)

    def _pace(self, tokens: int, seconds: float) -> dict[str, float]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
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
            "accuracy_before": self.accuracy_before,
            "accuracy_after": accuracies[-1] if accuracies else None,
            "last": rows[-1] if rows else None,
        }

    def close(self) -> None:
        self.console.stop()
        self.sampler.close()


def train(config: RunConfig, out: str | Path, resume: bool = False, console: RunConsole | None = None) -> dict:
    """Run a configuration in the folder `out` and return its summary; `resume` continues what the folder holds."""
    disable_progress_bar()  # loading and saving bars of transformers, between the step lines
    if resume:
        run, config = RunDirectory.reopen(out)
    else:
        run = RunDirectory.create(out)
    try:
        trainer = Trainer(config, run, console)
        run.start(config)
        try:
            return trainer.train()
        finally:
            trainer.close()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"the disk that holds {run.path} is full; free space and continue with: "
                f"trueup train --resume --out {run.path}",
            ) from error
        raise
    finally:
        run.close()
