"""What a sampler is: the engine that generates, behind four verbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from torch import Tensor

from trueup.quantize import SCHEMES, Quantiser
from trueup.rollouts import Rollouts

PRECISIONS = {"vllm": ("bf16", *SCHEMES), "transformers": ("bf16", "fp32")}


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says what to do about it."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Every setting is sent to the engine: a checkpoint's generation_config never slips in."""

    max_tokens: int
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...]
    """Ids that end a response; the one sampled stays in it, with its log-prob."""
    n: int = 1
    """Responses a prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    """Each response draws from a generator of its own, seeded from this and its place in the batch."""

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: a response needs at least 1 token")
        if self.n < 1:
            raise ValueError(f"n={self.n}: ask for at least 1 response a prompt")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected a value in (0, 1]; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: expected a value in [0, 1]; 0 turns it off")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}: expected a positive number, or -1 to turn it off")

    @property
    def full_support(self) -> bool:
        """Whether every token can be drawn: no top-p, top-k or min-p."""
        return self.top_p == 1 and self.top_k == -1 and self.min_p == 0


class Sampler(Protocol):
    """An engine that generates. Token ids in, token ids out: text is never re-tokenised."""

    engine: str
    """Its SPEC, e.g. `vllm:int8`."""
    version: int
    """The learner version of the weights it holds; -1 before the first `load`."""
    prefix_block: int
    """Tokens a prefix-cache block holds; 0 where the engine caches no prefixes."""
    quantiser: Quantiser | None
    """What rounds the weights it is given; None where they are taken as they are."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        """`sampling.n` responses a prompt, adjacent rows, group = index of the prompt, log mu as sampled from."""
        ...

    def generate_with_margins(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> tuple[Rollouts, Tensor]:
        """Greedy responses, and how sure each token was: largest minus second largest log-prob at its position, float32
        [N]. Raises ValueError at any other temperature than 0: the token drawn need not be the best there."""
        ...

    def score(self, rollouts: Rollouts) -> Tensor:
        """Prefill log-probs of the response tokens at temperature 1, float32 [N]; never read from a prefix cache."""
        ...

    def best_tokens(self, rollouts: Rollouts) -> Tensor:
        """The token rated highest at each response position, by the same prefill, int64 [N]."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight, named as in the checkpoint, and forget all cached prefixes."""
        ...

    def close(self) -> None:
        """Give the engine's memory back."""
        ...


def parse_spec(spec: str) -> tuple[str, str]:
    """`engine[:precision]` -> (engine, precision); the precision defaults to bf16. Raises ValueError by name."""
    engine, _, precision = spec.partition(":")
    precision = precision or "bf16"
    if engine not in PRECISIONS:
        near = get_close_matches(engine, PRECISIONS, n=1) or ["vllm"]
        raise ValueError(
            f"unknown engine {engine!r} in {spec!r}; known: {', '.join(PRECISIONS)}. Did you mean {near[0]}?"
        )
    if precision not in PRECISIONS[engine]:
        others = [name for name, known in PRECISIONS.items() if precision in known]
        hint = f"; {others[0]}:{precision} has it" if others else ""
        raise ValueError(f"{engine} cannot run {precision!r}; it runs {_listed(PRECISIONS[engine])}{hint}")
    return engine, precision


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def check_prompts(prompts: Sequence[Sequence[int]], sampling: Sampling, context: int) -> None:
    """Raise ValueError if a prompt is empty or cannot be answered within the model's context."""
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty; give at least one token")
        if len(prompt) + sampling.max_tokens > context:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; with {sampling.max_tokens} response tokens that is more than the "
                f"context of {context} that the sampler was started with. Shorten the prompt or ask for fewer tokens"
            )


def check_greedy(sampling: Sampling) -> None:
    """Raise ValueError unless every token is the best one of its position."""
    if sampling.temperature != 0:
        raise ValueError(
            f"temperature={sampling.temperature}: margins are of greedy decoding; set temperature=0, or call generate"
        )
