"""The live ladder: the same tokens scored on every rung between the learner and what the engine logged.

    learner bf16 -> float32 -> simulated int8 -> engine prefill -> engine decode
          learner precision  quantisation   kernels       decode and cache

Each step is a difference of log-probs, d_i = upper rung - lower rung, and they add up to D = log mu - log pi exactly.
A step's share of the gap is mean(d_i D) / mean(D^2). Shares add up to 1, are negative where a step undoes another, and
are shares of the KL as long as differences are small: KL(mu||pi) is then mean(D^2) / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.learner.model import Policy, best_tokens, load_causal_lm
from trueup.mismatch import measure
from trueup.quantize import simulated_int8
from trueup.rollouts import Rollouts, segment_ids, segment_sum, token_rows
from trueup.samplers.base import Sampler

_STEP_TO = {
    "fp32": "learner precision",
    "int8 simulated": "quantisation",
    "prefill": "kernels",
    "decode": "decode and cache",
}
"""The rung that a step leads to -> what the step is called."""


@dataclass(frozen=True)
class Step:
    """One step of the ladder, over all measured tokens."""

    cause: str
    share: float
    """Of the gap, mean(d D) / mean(D^2)."""
    share_low: float
    share_high: float
    """The share's 95% interval over responses."""
    k1: float
    """mean(d), its part of the k1 estimate of KL(mu||pi), nats."""
    rms: float
    """Root of mean(d^2), nats."""


@dataclass(frozen=True)
class Ladder:
    """What `climb` found for one sampler."""

    engine: str
    tokens: int
    steps: list[Step]
    null_rms: float
    """Root of the mean squared difference between two prefills by the engine in other batch compositions, nats."""
    null_share: float
    """The same as a share of mean(D^2)."""
    argmax_differs: float
    """Share of tokens where learner and engine rate different tokens highest."""
    by_position: list[dict[str, float]]
    """Mean |D| by place in the response."""
    largest: list[dict]
    """The tokens with the largest |pi - mu|, with every rung's log-prob."""
    stats: dict[str, float]
    """`mismatch.measure` of the whole gap."""


def climb(model: str, sampler: Sampler, rollouts: Rollouts, device: str = "cpu", token_budget: int = 4096) -> Ladder:
    """Score `rollouts`, which `sampler` drew at temperature 1 with the weights it still holds, on every rung.

    model: folder, hub name or `mini`; loaded in bf16 and in float32, one after the other. Raises ValueError if the rollouts
    were drawn at another temperature or with reduced support: a prefill knows neither.
    """
    plain = (rollouts.temperature == 1) & (rollouts.top_p == 1) & (rollouts.top_k == -1) & (rollouts.min_p == 0)
    if not plain.all():
        raise ValueError(
            "the ladder needs rollouts at temperature 1, top_p 1, top_k -1, min_p 0: a prefill knows no other"
        )
    learner = Policy(load_causal_lm(model, "bf16", device=device), token_budget)
    rungs = {"bf16": learner.score(rollouts)[0]}
    differs_N = best_tokens(learner, rollouts) != sampler.best_tokens(rollouts)
    exact = Policy(load_causal_lm(model, "fp32", device=device), token_budget)
    rungs["fp32"] = exact.score(rollouts)[0]
    if sampler.engine.endswith("int8"):
        with simulated_int8(exact.model):
            rungs["int8 simulated"] = exact.score(rollouts)[0]
    rungs["prefill"] = sampler.score(rollouts)
    rungs["decode"] = rollouts.sampler_logprobs
    # Another composition of the batch: the rows in reverse, in two halves.
    backwards = torch.arange(len(rollouts)).flip(0)
    again_N = torch.empty(rollouts.tokens)
    parts = [sampler.score(rollouts.rows(part)) for part in backwards.tensor_split(2)]
    again_N[token_rows(rollouts.offsets, backwards)] = torch.cat(parts)
    return split_gap(sampler.engine, rollouts, rungs, again_N, differs_N)


def split_gap(engine: str, rollouts: Rollouts, rungs: dict[str, Tensor], again_N: Tensor, differs_N: Tensor) -> Ladder:
    """The ladder of log-probs on each rung, lowest first: float32 [N] each.

    again_N: the prefill rung in another batch composition. differs_N: bool [N], whether the argmax differs.
    """
    known = torch.stack([*rungs.values(), again_N]).isfinite().all(0) & rollouts.loss_mask
    tokens = max(1, int(known.sum()))

    def difference(upper: Tensor, lower: Tensor) -> Tensor:
        return torch.where(known, upper.double() - lower.double(), 0)

    names = list(rungs)
    gap_N = difference(rungs["decode"], rungs[names[0]])
    null_N = difference(again_N, rungs["prefill"])
    total = float(gap_N.square().sum())
    return Ladder(
        engine=engine,
        tokens=int(known.sum()),
        steps=[
            _step(_STEP_TO[upper], difference(rungs[upper], rungs[lower]), gap_N, rollouts.offsets, tokens)
            for lower, upper in zip(names, names[1:])
        ],
        null_rms=(float(null_N.square().sum()) / tokens) ** 0.5,
        null_share=float(null_N.square().sum()) / total if total else 0.0,
        argmax_differs=float(differs_N[known].double().mean()) if known.any() else 0.0,
        by_position=_by_position(gap_N, known, rollouts),
        largest=_largest(rungs, known, rollouts),
        stats=measure(rungs["decode"], rungs[names[0]], rollouts.offsets, rollouts.loss_mask),
    )


def _step(cause: str, step_N: Tensor, gap_N: Tensor, offsets: Tensor, tokens: int) -> Step:
    """The share's interval is that of a ratio of sums over responses, linearised."""
    part_B, whole_B = segment_sum(step_N * gap_N, offsets), segment_sum(gap_N.square(), offsets)
    whole, count = float(whole_B.sum()), len(part_B)
    share = float(part_B.sum()) / whole if whole else 0.0
    error = 0.0
    if whole and count > 1:
        error = float((part_B - share * whole_B).square().sum().sqrt()) / whole * (count / (count - 1)) ** 0.5
    return Step(
        cause,
        share,
        share - 1.96 * error,
        share + 1.96 * error,
        k1=float(step_N.sum()) / tokens,
        rms=(float(step_N.square().sum()) / tokens) ** 0.5,
    )


def _by_position(gap_N: Tensor, known: Tensor, rollouts: Rollouts, bins: int = 7) -> list[dict[str, float]]:
    """Bins that double in width: what grows with the position shows in the later ones."""
    place_N = torch.arange(rollouts.tokens) - rollouts.offsets[:-1][segment_ids(rollouts.offsets)]
    longest = int(rollouts.lengths.max())
    edges = sorted({0, *(round(longest / 2**power) for power in range(bins))})
    found = []
    for low, high in zip(edges, edges[1:]):
        inside = known & (place_N >= low) & (place_N < high)
        if inside.any():
            mean = float(gap_N[inside].abs().mean())
            found.append({"from": low, "to": high, "tokens": int(inside.sum()), "log_rho_abs_mean": mean})
    return found


def _largest(rungs: dict[str, Tensor], known: Tensor, rollouts: Rollouts, count: int = 8) -> list[dict]:
    """Responses of one prompt share their beginnings: of tokens with the same text before them, one is shown."""
    first = next(iter(rungs.values()))
    difference_N = torch.where(known, (first.exp() - rungs["decode"].exp()).abs(), -1)
    row_N = segment_ids(rollouts.offsets)
    found, seen = [], set()
    for place in difference_N.topk(min(count * 16, rollouts.tokens)).indices.tolist():
        row, position = int(row_N[place]), place - int(rollouts.offsets[row_N[place]])
        before = (*rollouts.prompt(row).tolist(), *rollouts.response(row)[:position].tolist())
        if before in seen or difference_N[place] < 0 or len(found) == count:
            continue
        seen.add(before)
        found.append(
            {
                "row": row,
                "position": position,
                "token": int(rollouts.response_ids[place]),
                "prob_diff": float(difference_N[place]),
                **{name: float(values[place]) for name, values in rungs.items()},
            }
        )
    return found


def text_around(found: dict, rollouts: Rollouts, tokenizer, before: int = 12, after: int = 4) -> str:
    """The text around one of `Ladder.largest`, the token itself between guillemets."""
    response, place = rollouts.response(found["row"]).tolist(), found["position"]
    parts = (
        response[max(0, place - before) : place],
        response[place : place + 1],
        response[place + 1 : place + 1 + after],
    )
    left, token, right = (tokenizer.decode(part) for part in parts)
    return f"{left}«{token}»{right}"
