"""What other frameworks call our columns. `--columns ours=theirs,...` or the name of a preset."""

from __future__ import annotations

REQUIRED = ("sampler_logprobs", "learner_logprobs")
TOKEN = ("response_ids", "sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version")
ROW = ("learner_version", "step", "group", "temperature", "top_p", "top_k", "min_p")
EXTRA = ("prompt_ids", "finish_reason", "engine", "response_mask", "response_length")
"""`response_mask`: true on real tokens of padded arrays. `response_length`: how many of the tokens are the response."""
KNOWN = (*TOKEN, *ROW, *EXTRA)

PRESETS = {
    # The batch of GRPOTrainer._generate_and_score_completions in huggingface/trl, trl/trainer/grpo_trainer.py.
    # Its completions parquet holds text only, so the tensors have to be written by the user.
    "trl": {
        "prompt_ids": "prompt_ids",
        "response_ids": "completion_ids",
        "response_mask": "completion_mask",
        "sampler_logprobs": "sampling_per_token_logps",
        "learner_logprobs": "old_per_token_logps",
        "loss_mask": "tool_mask",
    },
    # The DataProto batch of RayPPOTrainer in verl, verl/trainer/ppo/ray_trainer.py. The JSONL of
    # `trainer.rollout_data_dir` (`_dump_generations`, same file) holds text only.
    "verl": {
        "prompt_ids": "prompts",
        "response_ids": "responses",
        "response_mask": "response_mask",
        "sampler_logprobs": "rollout_log_probs",
        "learner_logprobs": "old_log_probs",
        "group": "uid",
    },
    # token_exports/step_*/rank_*.jsonl, PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py,
    # SCHEMA_VERSION 1: whole sequences, prompt tokens outside the loss mask.
    "prime-rl": {
        "response_ids": "token_ids",
        "sampler_logprobs": "inference_logprobs",
        "learner_logprobs": "trainer_logprobs",
        "loss_mask": "loss_mask",
        "step": "step",
    },
    # `Sample` of THUDM/slime, slime/utils/types.py, and the train-side `log_probs`; --save-debug-rollout-data writes
    # them with torch.save: convert to JSONL or parquet first.
    "slime": {
        "response_ids": "tokens",
        "response_length": "response_length",
        "sampler_logprobs": "rollout_log_probs",
        "learner_logprobs": "log_probs",
        "loss_mask": "loss_mask",
        "group": "group_index",
    },
    # train_data_step*.jsonl, NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py (log_batched_dict_as_jsonl): whole padded
    # sequences, one object a sample.
    "nemo-rl": {
        "response_ids": "token_ids",
        "sampler_logprobs": "generation_logprobs",
        "learner_logprobs": "prev_logprobs",
        "loss_mask": "token_loss_mask",
    },
}
WHOLE_SEQUENCE = ("prime-rl", "nemo-rl")
"""Presets whose arrays cover the prompt too: tokens before the first one in the loss mask are the prompt."""


def parse_columns(text: str | None) -> tuple[dict[str, str], str | None]:
    """`--columns` -> (ours to theirs, name of the preset or None). Entries after a preset override it."""
    mapping, preset = {}, None
    for entry in filter(None, (part.strip() for part in (text or "").split(","))):
        ours, equals, theirs = (word.strip() for word in entry.partition("="))
        if not equals:
            if ours.lower() not in PRESETS:
                raise ValueError(
                    f"--columns {entry!r} is neither OURS=THEIRS nor a known format; formats: {', '.join(PRESETS)}"
                )
            preset = ours.lower()
            mapping = PRESETS[preset] | mapping
        elif ours not in KNOWN:
            raise ValueError(f"--columns names {ours!r}, which trueup does not read; it reads {', '.join(KNOWN)}")
        elif not theirs:
            raise ValueError(f"--columns {entry!r} names no column of the file; write {ours}=THEIR_NAME")
        else:
            mapping[ours] = theirs
    return mapping, preset


def detect(names: list[str]) -> tuple[dict[str, str], str | None]:
    """The mapping for a file with these columns: our own names, or the one preset whose two log-probs are there."""
    if all(name in names for name in REQUIRED):
        return {}, None
    for preset, mapping in PRESETS.items():
        if all(mapping[name] in names for name in REQUIRED):
            return mapping, preset
    return {}, None
