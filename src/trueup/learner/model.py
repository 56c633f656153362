"""The learner's model: a transformers causal LM that scores response tokens, in micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from trueup.learner.logprobs import Head, token_logprobs
from trueup.rollouts import Rollouts, token_rows

MINI = Path(__file__).parent.parent / "assets" / "mini"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def resolve(name: str) -> str:
    """`mini` -> the model that ships with trueup; anything else is a local folder or a hub name."""
    if name == "mini":
        return str(MINI)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not (path / "config.json").is_file():
        problem = "has no config.json" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"model {name!r} {problem}; give a Hugging Face model folder, a hub name, or mini")
    return str(path) if path.exists() else name


def model_config(name: str) -> PretrainedConfig:
    """The configuration of a causal LM. Raises FileNotFoundError if there is none, ValueError if it is another model."""
    path = resolve(name)
    try:
        config = AutoConfig.from_pretrained(path)
    except OSError as error:
        raise FileNotFoundError(
            f"model {name!r} was found neither as a folder nor on the hub; give a folder, a hub name such as "
            f"Qwen/Qwen2.5-0.5B-Instruct, or mini. The hub says: {str(error).splitlines()[0]}"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model {name!r} is a {config.model_type}, not a causal language model; trueup trains only those"
        )
    return config


def load_causal_lm(name: str, dtype: str = "bf16", attention: str = "sdpa", device: str = "cpu") -> nn.Module:
    """A causal LM by folder, hub name or `mini`. Raises ValueError if it is not one, FileNotFoundError if missing.

    device: `cpu`, `cuda`, or `auto` for a GPU where there is one.
    """
    config = model_config(name)
    # Dropout would make pi_old, the policy and the sampler three different functions of the same weights.
    for field, value in config.to_dict().items():
        if isinstance(value, float) and (field.endswith(("dropout", "_pdrop")) or field.startswith("dropout")):
            setattr(config, field, 0.0)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        resolve(name), config=config, dtype=DTYPES[dtype], attn_implementation=attention
    )
    return model.to(device)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ValueError without an EOS; a missing pad token is no harm: nothing is padded by text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(name))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"model {name!r} has no tokenizer that can be read: {error}") from error
    if not tokenizer.encode("1"):
        raise ValueError(f"the tokenizer of {name!r} knows no text; its folder lacks tokenizer.json or a vocabulary")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name!r} has no eos_token: a response could never end. "
            "Set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> tuple[int, ...]:
    """The EOS of the tokenizer, of the model's config and of its generation config: chat models name the end of a turn in
    any of the three. Nothing else is taken from the generation config."""
    ids = {tokenizer.eos_token_id}
    for config in (model.config, getattr(model, "generation_config", None)):
        named = getattr(config, "eos_token_id", None)
        ids.update(named if isinstance(named, (list, tuple)) else [named])
    return tuple(sorted(token for token in ids if token is not None))


def micro_batches(rollouts: Rollouts, token_budget: int) -> Iterator[Tensor]:
    """Row indices in groups of similar length whose padded size stays within `token_budget` (one row at least)."""
    lengths = (rollouts.prompt_offsets.diff() + rollouts.lengths).tolist()
    group: list[int] = []
    for row in sorted(range(len(rollouts)), key=lambda row: -lengths[row]):
        # Longest first: the group's first row sets its padded width.
        if group and lengths[group[0]] * (len(group) + 1) > token_budget:
            yield torch.tensor(group)
            group = []
        group.append(row)
    if group:
        yield torch.tensor(group)


def response_hidden(body: nn.Module, rollouts: Rollouts) -> Tensor:
    """Hidden states of the positions that predict each response token: [N, H].

    Rows are padded on the right, where causal attention never looks, so no attention mask is needed.
    """
    prompt_B, response_B = rollouts.prompt_offsets.diff(), rollouts.lengths
    lengths_B = prompt_B + response_B
    width = int(lengths_B.max())
    device = next(body.parameters()).device
    ids_BT = torch.zeros(len(rollouts), width, dtype=torch.int64)
    column = torch.arange(width)
    ids_BT[column < prompt_B[:, None]] = rollouts.prompt_ids.long()
    ids_BT[(column >= prompt_B[:, None]) & (column < lengths_B[:, None])] = rollouts.response_ids.long()
    hidden_BTH = body(input_ids=ids_BT.to(device), use_cache=False).last_hidden_state
    row_N = torch.repeat_interleave(torch.arange(len(rollouts)), response_B)
    position_N = torch.arange(rollouts.tokens) - rollouts.offsets[:-1][row_N] + prompt_B[row_N] - 1
    return hidden_BTH.flatten(0, 1)[(row_N * width + position_N).to(device)]


class Policy:
    """A causal LM and how it scores rollouts. The model may be in bf16; log-prob arithmetic is float32."""

    def __init__(self, model: nn.Module, token_budget: int = 16384, chunk: int = 1024):
        """token_budget: padded tokens a micro-batch holds. chunk: tokens whose logits exist at one time."""
        self.model = model
        self.token_budget = token_budget
        self.chunk = chunk

    def __call__(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), float32 [N] on the CPU, of one micro-batch at each row's temperature; differentiable.

        On the CPU wherever the model is: what follows is small vectors, and rollouts live there.
        """
        hidden_NH = response_hidden(self.model.base_model, rollouts)
        temperature_N = torch.repeat_interleave(rollouts.temperature, rollouts.lengths).to(hidden_NH.device)
        targets_N = rollouts.response_ids.to(hidden_NH.device)
        logprobs_N, entropy_N = token_logprobs(hidden_NH, Head.of(self.model), targets_N, temperature_N, self.chunk)
        return logprobs_N.cpu(), entropy_N.cpu()

    @torch.no_grad()
    def score(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), float32 [N] on the CPU, of any number of rollouts."""
        logprobs_N, entropy_N = torch.empty(rollouts.tokens), torch.empty(rollouts.tokens)
        for rows in micro_batches(rollouts, self.token_budget):
            tokens = token_rows(rollouts.offsets, rows)
            logprobs_N[tokens], entropy_N[tokens] = self(rollouts.rows(rows))
        return logprobs_N, entropy_N

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its checkpoint name. A tied head is listed too: engines keep a packed copy of it."""
        for name, weight in self.model.state_dict().items():
            yield name, weight.detach()

    def check_head(self) -> None:
        """Raise ValueError if our arithmetic of the head is not the model's own: it may scale or cap its logits."""
        ids = torch.arange(3, 9)
        probe = Rollouts.from_lists([ids[:3].tolist()], [ids[3:].tolist()])
        ours, _ = self.score(probe)
        with torch.no_grad():
            logits = self.model(input_ids=ids[None].to(self.model.device)).logits[0, 2:-1].float()
        theirs = logits.log_softmax(-1).gather(1, ids[3:, None].to(logits.device))[:, 0].cpu()
        # bf16 logits are a 128th of their size apart, and the model's own head may round to them.
        if (ours - theirs).abs().max() > 0.05 + float(logits.abs().max()) / 64:
            raise ValueError(
                f"{type(self.model).__name__} computes its logits in a way that trueup does not know: its log-probs "
                f"{theirs.tolist()} against ours {ours.tolist()}. Please report the model's name"
            )


@torch.no_grad()
def best_tokens(policy: Policy, rollouts: Rollouts) -> Tensor:
    """The token rated highest at each response position, int64 [N]."""
    head, best_N = Head.of(policy.model), torch.empty(rollouts.tokens, dtype=torch.int64)
    for rows in micro_batches(rollouts, policy.token_budget):
        hidden_NH = response_hidden(policy.model.base_model, rollouts.rows(rows))
        best = torch.cat([head.logits(part).argmax(-1) for part in hidden_NH.split(policy.chunk)])
        best_N[token_rows(rollouts.offsets, rows)] = best.cpu()
    return best_N
