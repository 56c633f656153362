"""TRL's own code: a real GRPOTrainer around a model of a few thousand weights.

`_generate_and_score_completions` makes the importance-sampling ratios and `_compute_loss` the loss, both untouched. Only
what would need an engine is replaced: which tokens were generated with which log-probs, and the model's log-probs.
"""

from __future__ import annotations

import math
import tempfile

import torch
from batches import Batch, Result
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LOSS_TYPES = {"token-mean": "dapo", "sequence-mean": "grpo"}


class Peer:
    def __init__(self, batch_size: int):
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                eos_token_id=1,
            )
        )
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=batch_size,
            num_generations=batch_size,
            use_cpu=True,
            bf16=False,
            report_to=[],
        )
        self.trainer = GRPOTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: self.rewards,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * batch_size}),
        )
        self.trainer.current_gradient_accumulation_steps = 1  # Trainer.train sets it
        self.trainer.use_vllm = True  # the engine itself is never asked: `_generate` is replaced below
        self.default = (
            config.vllm_importance_sampling_correction,
            config.vllm_importance_sampling_mode,
            config.vllm_importance_sampling_clip_max,
            config.vllm_importance_sampling_clip_min,
        )

    def corrected(self, given: Batch, mode: str | None, off_policy_mask: float | None = None) -> Result:
        """mode: vllm_importance_sampling_mode; None: no importance sampling. The advantages are TRL's own, of rewards that
        are the batch's advantages; read them from `self.advantages`."""
        trainer, self.rewards = self.trainer, given.advantages.tolist()
        trainer.vllm_importance_sampling_correction = mode is not None
        trainer.vllm_importance_sampling_mode = mode
        trainer.off_policy_mask_threshold = off_policy_mask
        rows = range(len(given.lengths))
        lengths = given.lengths.tolist()
        mu = [[None if math.isnan(x) else x for x in given.mu[row, : lengths[row]].tolist()] for row in rows]
        tokens = [[2] * length for length in lengths]
        tool_mask = [given.mask[row, : lengths[row]].long().tolist() for row in rows]
        trainer._generate = lambda prompts: (
            [[2]] * len(prompts),
            tokens,
            tool_mask,
            ["a"] * len(prompts),
            mu,
            {},
            None,
            None,
        )
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (given.pi, None, None)
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "a"} for _ in rows])
        self.advantages = inputs["advantages"]
        ratio = inputs.get("importance_sampling_ratio", torch.ones_like(given.mu))
        weights = ratio.expand_as(given.mu) * given.mask
        if off_policy_mask is not None:
            weights = weights * GRPOTrainer.get_off_policy_mask(
                self.advantages[:, None],
                given.theta,
                inputs["sampling_per_token_logps"],
                given.mask.long(),
                off_policy_mask,
            )
        losses, gradients = {}, {}
        for ours, theirs in LOSS_TYPES.items():
            trainer.loss_type = theirs
            theta = given.theta.clone().requires_grad_()
            scored = (theta, torch.zeros_like(theta), None)
            trainer._get_per_token_logps_and_entropies = lambda *_, scored=scored, **__: scored
            loss = trainer._compute_loss(trainer.model, inputs)
            (gradients[ours],) = torch.autograd.grad(loss, theta)
            losses[ours] = float(loss.detach())
        return Result(weights, losses, gradients)
