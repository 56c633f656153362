"""The run's configuration: every field with its default, its unit and the reason for the default."""

from __future__ import annotations

from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trueup.correction import Correction, preset
from trueup.objectives import Objective
from trueup.quantize import SCHEMES
from trueup.samplers.base import Sampling, parse_spec


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SamplerConfig(Section):
    engine: Literal["vllm", "transformers"] = "vllm"
    """vllm is the fast path; transformers needs no engine installed and is the reference."""
    precision: Literal["bf16", "int8", "int8-tensor", "int8-static", "int4", "int4-channel", "fp32"] = "bf16"
    """int8 halves the memory traffic of the rollouts; correct what it costs (see `correction`). int8: one weight scale an
    output channel, one activation scale a token. int8-tensor: one weight scale a matrix. int8-static: activation scales from
    calibration, one a layer. int4: 4-bit weights, one scale 32 inputs, bf16 activations; int4-channel: one a channel."""
    activation_range: float = Field(1.0, gt=0)
    """int8-static only: what activation scales span, as a multiple of the largest input seen in calibration. Above 1 leaves
    room for growth at the price of coarser steps, below 1 cuts the largest: the mismatch follows it over two decades."""
    temperature: float = Field(1.0, gt=0)
    """1: the policy that samples is the policy that is trained. The learner applies the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1: off. Below 1 the sampler renormalises and the learner does not: see `correction`."""
    top_k: int = -1
    """-1: off, for the same reason."""
    min_p: float = Field(0.0, ge=0, le=1)
    """0: off, for the same reason."""
    kv_cache_gib: int = Field(1, ge=1)
    """Whole GiB. vLLM's key/value cache on CPU; 1 holds half a million tokens of a small model."""
    gpu_memory: float = Field(0.4, gt=0, lt=1)
    """Share of the GPU that vLLM may take; the learner beside it needs the rest."""
    max_sequences: int = Field(512, ge=1)
    """Responses decoded side by side."""

    @property
    def spec(self) -> str:
        return f"{self.engine}:{self.precision}"


class BatchConfig(Section):
    prompts: int = Field(64, ge=1)
    """Prompts a step."""
    samples: int = Field(8, ge=1)
    """Responses a prompt (the group size)."""
    minibatches: int = Field(1, ge=1)
    """Updates an epoch. 1 with 1 epoch is strictly on-policy: no second forward for pi_old is paid."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch of rollouts."""
    prompt_length: int = Field(256, ge=1)
    """Tokens. Longest prompt; problems with a longer one are left out and counted, never cut."""
    response_length: int = Field(256, ge=1)
    """Tokens. Longest response."""


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """The published value for 0.5B and up; small models want more."""
    warmup_steps: int = Field(0, ge=0)
    """Updates of linear warm-up: Adam's first steps are the largest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up. RL has no natural end, so the default does not decay."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices only. 0: RL fine-tunes few steps, decay would pull towards zero, not towards the start."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's memory of the gradient: about 10 updates, the usual value."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Adam's memory of its square: about 1000 updates, the usual value."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the mean square, so that weights without gradient do not divide by zero."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""


class LearnerConfig(OptimizerConfig):
    dtype: Literal["bf16", "fp32"] = "bf16"
    """What the model computes in; masters, gradients and log-prob arithmetic are float32 in either case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if torch sees one."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """transformers' attention implementation; eager is faster for models of a few million weights on CPU."""
    token_budget: int = Field(16384, ge=1)
    """Padded tokens a micro-batch holds. Bounds memory; results do not depend on it."""
    chunk: int = Field(1024, ge=1)
    """Tokens whose logits exist at one time. Bounds memory at large vocabularies; results do not depend on it."""
    gradient_checkpointing: bool = False
    """Trades a second forward for activation memory."""


class CriticConfig(OptimizerConfig):
    model: str | None = None
    """Folder or hub name of the critic's body; null: the policy's own model."""
    lr: float = Field(1e-5, gt=0)
    """Ten times the actor's, as published: its head starts from nothing."""
    warmup_rollouts: int = Field(0, ge=0)
    """Steps in which only the critic learns, so that the policy's first advantages mean something."""


class AdvantageConfig(Section):
    kind: Literal["gae", "grpo", "dr-grpo", "rloo", "reinforce++"] = "grpo"
    """gae needs the critic; the others compare the responses of a group."""
    gamma: float = Field(1.0, ge=0, le=1)
    """1: a reward at the end counts in full for every token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda; 1 is unbiased, which suits one reward at the end."""
    whiten: bool = True
    """gae only: zero mean, unit variance over the batch."""


class RewardConfig(Section):
    dynamic_sampling: bool = False
    """DAPO: groups whose responses all score the same carry no signal; sample others until the batch is full."""
    max_refills: int = Field(5, ge=0, le=60)
    """Extra rounds of sampling that dynamic sampling may spend a step; what is still missing then is filled without."""
    overlong_buffer: int = Field(0, ge=0)
    """DAPO: the last tokens before response_length cost a growing penalty; 0: off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """The penalty at full length."""


class DeliveryConfig(Section):
    every: int = Field(1, ge=1)
    """Steps between deliveries; above 1 the sampler is stale on purpose. The learner then keeps a copy of the weights it
    delivered (2 bytes a weight in bf16, 4 in fp32) and scores rollouts with it: rho stays pure mismatch, and staleness lies
    in the policy ratio. At 1 there is no copy."""
    scales: Literal["fresh", "frozen"] = "fresh"
    """Of a quantised sampler. fresh: computed at every delivery. frozen: those of the first delivery, values beyond them are
    cut, as 8-bit rollouts with scales from one calibration had it."""
    prove: bool = True
    """Score a canary batch on both sides after each delivery, and stop if the weights did not land."""
    canary_sequences: int = Field(16, ge=2)
    """Sequences of the canary batch."""
    canary_tokens: int = Field(8, ge=1)
    """Tokens that each canary sequence is continued by after a delivery."""


class LogConfig(Section):
    rollouts_every: int = Field(1, ge=0)
    """Steps between rollout files; 0: none."""
    eval_every: int = Field(20, ge=0)
    """Steps between held-out evaluations (greedy, learner's own weights in the reference engine); 0: only first and last."""
    eval_problems: int = Field(256, ge=1)
    """Held-out problems of an evaluation."""
    eval_by: Literal["learner", "sampler"] = "learner"
    """learner: by the reference engine in the learner's precision. sampler: faster for long responses, and honest only
    where it runs in full precision, so refused for int8 and int4."""
    checkpoint_every: int = Field(50, ge=0)
    """Steps between checkpoints; 0: only the last."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older ones are deleted: each holds the optimizer's state too."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where metrics go besides metrics.jsonl; each needs its own library."""


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": {"kind": "gae"}},
    "grpo": {"advantage": {"kind": "grpo"}, "objective": {"aggregation": "sequence-mean"}},
    "dapo": {
        "advantage": {"kind": "grpo"},
        "objective": {"clip_high": 0.28, "dual_clip": 10.0, "aggregation": "token-mean"},
        "reward": {"dynamic_sampling": True},
    },
    "rloo": {"advantage": {"kind": "rloo"}, "objective": {"kind": "reinforce"}},
    "dr-grpo": {"advantage": {"kind": "dr-grpo"}, "objective": {"aggregation": "constant"}},
    # The clip range of GSPO's paper: whole-response ratios move far less than a token's.
    "gspo": {
        "advantage": {"kind": "grpo"},
        "objective": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence-mean"},
    },
    "cispo": {"advantage": {"kind": "grpo"}, "objective": {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    "reinforce++": {"advantage": {"kind": "reinforce++"}},
}
"""What each name means: the fields it sets. A key the user gives wins over the algorithm's."""


class RunConfig(Section):
    model: str = "mini"
    """The model to train: folder, hub name, or `mini`, which ships with trueup."""
    task: str = "sums"
    """What is asked: sums, gsm8k[:PATH], reasoning_gym:NAME, jsonl:PATH."""
    algorithm: Literal["ppo", "grpo", "dapo", "rloo", "dr-grpo", "gspo", "cispo", "reinforce++"] = "grpo"
    """A name for a set of the fields below; keys given explicitly win."""
    correction: Correction = Field(default_factory=lambda: preset("none"))
    """What is done about the mismatch: a preset (tis, mis, ...) or its fields."""
    steps: int = Field(100, ge=1)
    """Batches of rollouts."""
    seed: int = 0
    """Of the problems' order, the sampling and the minibatches."""
    sampler: SamplerConfig = SamplerConfig()
    """Who generates, and how it draws."""
    batch: BatchConfig = BatchConfig()
    """How much is sampled a step, and how often it is learned from."""
    learner: LearnerConfig = LearnerConfig()
    """How the policy computes and is optimised."""
    critic: CriticConfig = CriticConfig()
    """The value model; used by advantage.kind=gae only."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Rewards -> advantages."""
    objective: Objective = Objective()
    """Which loss, and how token losses become one number."""
    reward: RewardConfig = RewardConfig()
    """What is done to the task's rewards and to groups without signal."""
    delivery: DeliveryConfig = DeliveryConfig()
    """When the sampler gets the learner's weights, and how that is proved."""
    log: LogConfig = LogConfig()
    """What a run writes, and how often."""

    @field_validator("correction", mode="before")
    @classmethod
    def _named_correction(cls, value):
        return value if isinstance(value, Correction) else preset(value)

    @model_validator(mode="before")
    @classmethod
    def _apply_algorithm(cls, given):
        if isinstance(given, dict) and isinstance(name := given.get("algorithm", "grpo"), str) and name in ALGORITHMS:
            return merge(ALGORITHMS[name], given)
        return given

    @model_validator(mode="after")
    def _possible(self):
        parse_spec(self.sampler.spec)
        full_support = self.sampling(stop_token_ids=()).full_support  # refuses settings that no sampler takes
        if self.correction != preset("none") and not full_support:
            raise ValueError(
                f"sampler.top_p={self.sampler.top_p}, top_k={self.sampler.top_k}, min_p={self.sampler.min_p} remove tokens "
                "and renormalise on the sampler's side only; the mismatch ratio then corrects for something that is not "
                "mismatch. Use top_p=1, top_k=-1, min_p=0 with a correction, or correction=none"
            )
        if self.advantage.kind in ("grpo", "dr-grpo", "rloo") and self.batch.samples < 2:
            raise ValueError(
                f"advantage.kind={self.advantage.kind} compares the responses of a group; batch.samples={self.batch.samples} "
                "leaves nothing to compare. Use at least 2, or algorithm=ppo"
            )
        if self.batch.minibatches > self.batch.prompts * self.batch.samples:
            raise ValueError(
                f"batch.minibatches={self.batch.minibatches} but a step has only "
                f"{self.batch.prompts * self.batch.samples} responses"
            )
        if self.reward.dynamic_sampling and self.batch.samples < 2:
            raise ValueError("reward.dynamic_sampling needs groups: set batch.samples to at least 2")
        precision, quantised = self.sampler.precision, self.sampler.precision in SCHEMES
        if self.log.eval_by == "sampler" and quantised:
            raise ValueError(
                f"log.eval_by=sampler would report what {precision} can do, not what was learned; use eval_by=learner"
            )
        if self.delivery.scales == "frozen" and not quantised:
            raise ValueError(
                f"delivery.scales=frozen but sampler.precision={precision} has no scales; use fresh, or precision=int8"
            )
        if self.sampler.activation_range != 1 and precision != "int8-static":
            raise ValueError(
                f"sampler.activation_range={self.sampler.activation_range} but sampler.precision={precision} computes its "
                "activation scales, if any, as it goes; use 1, or precision=int8-static"
            )
        if self.delivery.every > 1 and self.log.checkpoint_every % self.delivery.every:
            fitting = -(-self.log.checkpoint_every // self.delivery.every) * self.delivery.every
            raise ValueError(
                f"log.checkpoint_every={self.log.checkpoint_every} is no multiple of delivery.every={self.delivery.every}: a "
                f"run resumed between deliveries would sample from fresher weights than one never interrupted; use {fitting}"
            )
        if self.reward.overlong_buffer >= self.batch.response_length:
            raise ValueError(
                f"reward.overlong_buffer={self.reward.overlong_buffer} must be shorter than "
                f"batch.response_length={self.batch.response_length}"
            )
        return self

    @property
    def strictly_on_policy(self) -> bool:
        """One update a batch: pi_old is the policy itself, so its log-probs come from the update's own forward."""
        return self.batch.minibatches == 1 and self.batch.epochs == 1

    def sampling(self, stop_token_ids: tuple[int, ...], **changes) -> Sampling:
        """The sampling settings of a training step."""
        settings = dict(
            max_tokens=self.batch.response_length,
            stop_token_ids=stop_token_ids,
            n=self.batch.samples,
            temperature=self.sampler.temperature,
            top_p=self.sampler.top_p,
            top_k=self.sampler.top_k,
            min_p=self.sampler.min_p,
        )
        return Sampling(**settings | changes)

    def to_yaml(self) -> str:
        """Every field, resolved; loading it gives the same configuration again."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def merge(below: dict, above: dict) -> dict:
    """Nested dictionaries, `above` winning; neither is changed."""
    merged = {key: merge(value, {}) if isinstance(value, dict) else value for key, value in below.items()}
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else (merge(value, {}) if isinstance(value, dict) else value)
    return merged
