"""Training runs with one deliberate fault each, on one real engine: python tests/faulty.py OUT NAME...

Every run is trueup's own Trainer with the proof of delivery switched off, which would stop most of them. NAME is one of
RUNS; OUT/NAME is the run's folder.
"""

import os
import sys
from pathlib import Path

import trueup.collect
import trueup.train
from trueup.configfile import load_config
from trueup.learner.model import MINI
from trueup.samplers.vllm import VLLMSampler
from trueup.tasks.base import Problem
from trueup.tasks.sums import Sums, work_out

SMALL = {
    "algorithm": "grpo",
    "steps": 6,
    "sampler": {"precision": "bf16"},
    "batch": {"prompts": 16, "samples": 4, "minibatches": 2, "prompt_length": 192, "response_length": 64},
    "learner": {"lr": 2e-4, "attention": "eager"},
    "delivery": {"prove": False},
    "log": {"eval_problems": 4, "checkpoint_every": 0},
}
RUNS = {
    # name: (fault, changes of the configuration, whether prompts come again)
    "healthy": (None, {}, False),
    "weights": ("withheld layer", {}, False),
    "truncated-support": ("top-p in the engine", {}, False),
    "healthy-t06": (None, {"temperature": 0.6}, False),
    "temperature": ("raw log-probs", {"temperature": 0.6}, False),
    "healthy-repeated": (None, {}, True),
    "cache": ("prefixes kept", {}, True),
}


class Repeated(Sums):
    """Sums of 48 numbers, prompts longer than a block of the engine's prefix cache: eight that come again in most steps,
    among as many new ones. Nobody solves them; the reward is how far the running totals begin as they should."""

    def __init__(self):
        super().__init__(heldout=4, addends=48)
        numbers = [self.train.numbers(i) for i in (*(i % 8 for i in range(48)), *range(8, 56))]
        self.train = [Problem("+".join(map(str, addends)) + "=", work_out(addends)) for addends in numbers]

    def score(self, problem: Problem, response: str) -> float:
        return len(os.path.commonprefix([response, problem.answer])) / 20


class Faulty:
    """The real sampler, shared by all runs; a fault changes one thing of it."""

    def __init__(self, sampler: VLLMSampler, fault: str | None):
        self._sampler, self._fault, self._first = sampler, fault, {}
        self._vllm, self._params = sampler._vllm, sampler._vllm.SamplingParams
        mode = "raw_logprobs" if fault == "raw log-probs" else "processed_logprobs"
        sampler._llm.collective_rpc(_report, args=(mode,))
        if fault == "prefixes kept":
            sampler.forget_prefixes = lambda: None
        if fault == "top-p in the engine":
            self._vllm.SamplingParams = self._truncated

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def _truncated(self, **settings):
        sampled = settings.get("prompt_logprobs") is None and settings.get("temperature", 1) > 0
        return self._params(**settings | ({"top_p": 0.8} if sampled else {}))

    def load(self, weights, version):
        weights = [(name, weight.clone()) for name, weight in weights]
        if self._fault == "withheld layer":
            weights = [
                (name, self._first.setdefault(name, weight) if ".layers.1." in name else weight)
                for name, weight in weights
            ]
        self._sampler.load(weights, version)

    def close(self):
        self._vllm.SamplingParams = self._params
        self._sampler.__dict__.pop("forget_prefixes", None)


def _report(worker, mode: str) -> None:
    """Which log-probs the engine returns: what `logprobs_mode` sets at start-up."""
    sampler = worker.model_runner.sampler
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode


def main(out: Path, names: list[str]) -> None:
    sampler = VLLMSampler(str(MINI), "bf16", context=256)
    load_task = trueup.collect.load_task
    for name in names:
        fault, changes, repeated = RUNS[name]
        trueup.train.open_sampler = lambda *_, fault=fault, **__: Faulty(sampler, fault)
        trueup.collect.load_task = (lambda *_, **__: Repeated()) if repeated else load_task
        trueup.train.train(load_config(SMALL | {"sampler": SMALL["sampler"] | changes}), out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
