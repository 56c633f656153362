"""What other frameworks call our columns. `--columns ours=theirs,...` or the name of a preset."""

from __future__ import annotations

from collections.abc import Iterable

REQUIRED = ("sampler_logprobs", "learner_logprobs")
TOKEN = ("response_ids", "sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version")
ROW = ("learner_version", "step", "group", "temperature", "top_p", "top_k", "min_p")
EXTRA = ("prompt_ids", "finish_reason", "engine", "response_mask", "response_length", "row_in_loss")
"""`response_mask`: true on the tokens of padded arrays that the policy wrote. `response_length`: how many of the tokens
are the response. `row_in_loss`: false for a response that the loss leaves out as a whole."""
KNOWN = (*TOKEN, *ROW, *EXTRA)

Mapping = dict[str, tuple[str, ...]]
"""Ours -> theirs; of several names the first that a file has."""

PRESETS: dict[str, Mapping] = {
    # The batch that GRPOTrainer._generate_and_score_completions returns: trl/trainer/grpo_trainer.py in huggingface/trl.
    # Prompts are padded on the left, all else on the right; `tool_mask` is false on tool results.
    "trl": {
        "prompt_ids": ("prompt_ids",),
        "response_ids": ("completion_ids",),
        "response_mask": ("completion_mask",),
        "sampler_logprobs": ("sampling_per_token_logps",),
        "learner_logprobs": ("old_per_token_logps",),
        "loss_mask": ("tool_mask",),
    },
    # The DataProto batch of RayPPOTrainer.fit: verl/trainer/ppo/ray_trainer.py in volcengine/verl. Prompts are padded on the
    # left, responses on the right (rollout_log_probs with -1: verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py);
    # `response_mask` is 0 on padding and on what tools wrote.
    "verl": {
        "prompt_ids": ("prompts",),
        "response_ids": ("responses",),
        "response_mask": ("response_mask",),
        "sampler_logprobs": ("rollout_log_probs",),
        "learner_logprobs": ("old_log_probs",),
        "group": ("uid",),
        "step": ("step", "global_steps"),
    },
    # token_exports/step_*/rank_*.jsonl: src/prime_rl/trainer/rl/token_export.py in PrimeIntellect-ai/prime-rl, its
    # SCHEMA_VERSION 1. Whole sequences; log-probs belong to the token of their position (train.py shifts them right).
    "prime-rl": {
        "response_ids": ("token_ids",),
        "sampler_logprobs": ("inference_logprobs",),
        "learner_logprobs": ("trainer_logprobs",),
        "loss_mask": ("loss_mask",),
        "step": ("export_step", "step"),
    },
    # --save-debug-train-data: slime/backends/megatron_utils/train_dump_utils.py in THUDM/slime (older:
    # slime/utils/train_dump_utils.py). `tokens` are prompt and response, all else covers the response. Names in the plural
    # are those of RolloutManager._convert_samples_to_train_data, slime/ray/rollout.py; in the singular those of `Sample`,
    # slime/utils/types.py.
    "slime": {
        "response_ids": ("tokens",),
        "response_length": ("response_lengths", "response_length"),
        "sampler_logprobs": ("rollout_log_probs",),
        "learner_logprobs": ("log_probs",),
        "loss_mask": ("loss_masks", "loss_mask"),
        "group": ("group_index",),
        "step": ("rollout_id",),
    },
    # train_data_step*.jsonl: nemo_rl/algorithms/grpo.py in NVIDIA-NeMo/RL, written by log_batched_dict_as_jsonl in
    # nemo_rl/utils/logger.py: slices of one sample, so that every value is a list of one. Whole sequences, padded right.
    "nemo-rl": {
        "response_ids": ("token_ids",),
        "sampler_logprobs": ("generation_logprobs",),
        "learner_logprobs": ("prev_logprobs",),
        "loss_mask": ("token_loss_mask",),
        "row_in_loss": ("sample_loss_mask",),
    },
}
WHOLE_SEQUENCE = ("prime-rl", "nemo-rl")
"""Presets whose arrays cover the prompt too: tokens before the first one in the loss mask are the prompt."""

_ADD = "write one row a response, as parquet or JSONL, with"
WITHOUT_LOGPROBS: tuple[tuple[set[str], str], ...] = (
    (
        {"prompt", "completion"},
        "this looks like TRL's completions log, which holds text only. From what "
        f"GRPOTrainer._generate_and_score_completions returns {_ADD} prompt_ids, completion_ids, completion_mask, "
        "sampling_per_token_logps, old_per_token_logps (and tool_mask); the two log-probs are there with use_vllm=True and "
        "vllm_importance_sampling_correction=True",
    ),
    (
        {"input", "output", "score"},
        "this looks like verl's rollout_data_dir log, which holds text only. After old_log_probs are computed in "
        f"RayPPOTrainer.fit {_ADD} responses, response_mask, rollout_log_probs, old_log_probs (and prompts, uid) of the batch, "
        "with actor_rollout_ref.rollout.calculate_log_probs=True",
    ),
    (
        {"responses", "rollout_log_probs"},
        "verl's batch gets old_log_probs later in the step: write it after they are computed, with "
        "algorithm.rollout_correction.bypass_mode=False (bypassed, they are a copy of rollout_log_probs)",
    ),
    (
        {"completion_ids", "sampling_per_token_logps"},
        "TRL's batch has old_per_token_logps only where they are recomputed: set vllm_importance_sampling_correction=True",
    ),
    (
        {"tokens", "rollout_log_probs"},
        "this looks like slime's rollout dump, written before the learner scored anything. Give the train dump "
        "(--save-debug-train-data PATH with {rollout_id} and {rank}), without --use-rollout-logprobs or with "
        "--get-mismatch-metrics",
    ),
    (
        {"tokens", "log_probs"},
        "this looks like slime's train dump without the engine's log-probs: slime keeps rollout_log_probs where the rollout "
        "function returns them",
    ),
    (
        {"content", "input_lengths"},
        "this looks like a NeMo-RL log of a run that keeps no log-probs (SFT, distillation, validation): GRPO's "
        "train_data_step*.jsonl has generation_logprobs, prev_logprobs, token_ids and token_loss_mask",
    ),
)
"""What a dump without both log-probs looks like, by columns it has, and what its writer has to add."""


def parse_columns(text: str | None) -> tuple[Mapping, str | None]:
    """`--columns` -> (ours to theirs, name of the preset or None). Entries beside a preset override it."""
    mapping: Mapping = {}
    preset = None
    for entry in filter(None, (part.strip() for part in (text or "").split(","))):
        ours, equals, theirs = (word.strip() for word in entry.partition("="))
        if not equals:
            if ours.lower() not in PRESETS:
                raise ValueError(
                    f"--columns {entry!r} is neither OURS=THEIRS nor a known format; formats: {', '.join(PRESETS)}"
                )
            preset = ours.lower()
        elif ours not in KNOWN:
            raise ValueError(f"--columns names {ours!r}, which trueup does not read; it reads {', '.join(KNOWN)}")
        elif not theirs:
            raise ValueError(f"--columns {entry!r} names no column of the file; write {ours}=THEIR_NAME")
        else:
            mapping[ours] = (theirs,)
    return (PRESETS[preset] if preset else {}) | mapping, preset


def detect(names: Iterable[str]) -> tuple[Mapping, str | None]:
    """The mapping for a file with these columns: our own names, or the one preset whose two log-probs are there."""
    names = set(names)
    if names.issuperset(REQUIRED):
        return {}, None
    for preset, mapping in PRESETS.items():
        if all(names.intersection(mapping[name]) for name in REQUIRED):
            return mapping, preset
    return {}, None


def wanted(mapping: Mapping) -> set[str]:
    """Every column of a file that may be read under this mapping."""
    return set(KNOWN).union(*mapping.values())


def advice(names: Iterable[str]) -> str | None:
    """What the writer of a dump with these columns, and without both log-probs, has to add."""
    names = set(names)
    return next((text for have, text in WITHOUT_LOGPROBS if names.issuperset(have)), None)
