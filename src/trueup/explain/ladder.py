"""The live ladder: the same tokens scored on every rung between the learner and what the engine logged.

    learner bf16 -> float32 -> simulated quantisation -> engine prefill -> engine decode
          learner precision  quantisation         kernels       decode and cache

The simulated rung is there for quantised samplers only. Each step is a difference of log-probs, d_i = upper rung - lower rung, and
they add up to D = log mu - log pi exactly. A step's share of the gap is mean(d_i D) / mean(D^2). Shares add up to 1, are
negative where a step undoes another, and are shares of the KL as long as differences are small: KL(mu||pi) is then
mean(D^2) / 2.

Two nulls stand beside the steps. `null`: the engine's prefill in two batch compositions. `rounding`, where activations are
int8 too: simulated int8 with two attention kernels. Rounding activations to int8 turns a difference in the last bit into another code, which the
later layers multiply: two runs of the same int8 arithmetic then share the weights' error and differ in the activations'. Half
of the mean squared difference is what one run holds of that, and shows in the ladder as `kernels`: up to this size, kernels
are int8's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.learner.model import Policy, best_tokens, load_causal_lm
from trueup.mismatch import measure
from trueup.rollouts import Rollouts, segment_ids, segment_sum, token_rows
from trueup.samplers.base import Sampler

_STEP_TO = {
    "fp32": "learner precision",
    "simulated": "quantisation",
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
    k1_low: float
    k1_high: float
    """95% interval of k1 over responses."""
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
    null_low: float
    null_high: float
    """95% interval of that share over responses."""
    rounding_share: float | None
    """int8 activations only: half of the mean squared difference of two int8 simulations that sum in another order, as a share of
    mean(D^2): the part of `kernels` that comes with int8."""
    rounding_low: float | None
    rounding_high: float | None
    argmax_differs: float
    """Share of tokens where learner and engine rate different tokens highest."""
    by_position: list[dict]
    """Mean |D| by place in the response with its 95% interval, and the mean |d| of each step there (`step_abs_mean`)."""
    growth: dict[str, float]
    """Least-squares slope of |D| over log2 of the position: nats a doubling, with its 95% interval over responses."""
    largest: list[dict]
    """The tokens with the largest |pi - mu|, with every rung's log-prob and the `step` that moved them most."""
    stats: dict[str, float]
    """`mismatch.measure` of the whole gap."""


def climb(model: str, sampler: Sampler, rollouts: Rollouts, device: str = "cpu", token_budget: int = 4096) -> Ladder:
    """Score `rollouts`, which `sampler` drew at temperature 1 with the weights it still holds, on every rung.

    model: folder, hub name or `mini`; loaded in bf16 and in float32, one after the other. The bf16 log-probs are left in
    `rollouts.learner_logprobs`. Raises ValueError if the rollouts were drawn at another temperature or with reduced
    support: a prefill knows neither.
    """
    plain = (rollouts.temperature == 1) & (rollouts.top_p == 1) & (rollouts.top_k == -1) & (rollouts.min_p == 0)
    if not plain.all():
        raise ValueError(
            "the ladder needs rollouts at temperature 1, top_p 1, top_k -1, min_p 0: a prefill knows no other"
        )
    quantiser = sampler.quantiser
    learner = Policy(load_causal_lm(model, "bf16", device=device), token_budget)
    rungs = {"bf16": learner.score(rollouts)[0]}
    differs_N = best_tokens(learner, rollouts) != sampler.best_tokens(rollouts)
    twice = None
    if quantiser is not None and quantiser.scheme.activations:
        with quantiser.simulated(learner.model):
            twice = [learner.score(rollouts)[0]]
            learner.model.set_attn_implementation("eager")
            twice.append(learner.score(rollouts)[0])
    del learner  # before the float32 copy comes
    exact = Policy(load_causal_lm(model, "fp32", device=device), token_budget)
    rungs["fp32"] = exact.score(rollouts)[0]
    if quantiser is not None:
        with quantiser.simulated(exact.model):
            rungs["simulated"] = exact.score(rollouts)[0]
    rungs["prefill"] = sampler.score(rollouts)
    rungs["decode"] = rollouts.sampler_logprobs
    # Another composition of the batch: the rows in reverse, in two halves.
    backwards = torch.arange(len(rollouts)).flip(0)
    again_N = torch.empty(rollouts.tokens)
    parts = [sampler.score(rollouts.rows(part)) for part in backwards.tensor_split(2)]
    again_N[token_rows(rollouts.offsets, backwards)] = torch.cat(parts)
    rollouts.learner_logprobs = rungs["bf16"]
    return split_gap(sampler.engine, rollouts, rungs, again_N, differs_N, twice)


def split_gap(
    engine: str,
    rollouts: Rollouts,
    rungs: dict[str, Tensor],
    again_N: Tensor,
    differs_N: Tensor,
    twice: Sequence[Tensor] | None = None,
) -> Ladder:
    """The ladder of log-probs on each rung, lowest first: float32 [N] each.

    again_N: the prefill rung in another batch composition. differs_N: bool [N], whether the argmax differs.
    twice: simulated int8 in two orders of sums.
    """
    known = torch.stack([*rungs.values(), again_N]).isfinite().all(0) & rollouts.loss_mask
    tokens = max(1, int(known.sum()))

    def difference(upper: Tensor, lower: Tensor) -> Tensor:
        return torch.where(known, upper.double() - lower.double(), 0)

    names = list(rungs)
    gap_N = difference(rungs["decode"], rungs[names[0]])
    null_N = difference(again_N, rungs["prefill"])
    step_N = {_STEP_TO[upper]: difference(rungs[upper], rungs[lower]) for lower, upper in zip(names, names[1:])}
    null = _share(null_N.square(), gap_N, rollouts.offsets)
    rounding = [None] * 3
    if twice is not None:
        rounding = _share(difference(*twice).square() / 2, gap_N, rollouts.offsets)
    return Ladder(
        engine=engine,
        tokens=int(known.sum()),
        steps=[_step(cause, values, gap_N, known, rollouts.offsets) for cause, values in step_N.items()],
        null_rms=(float(null_N.square().sum()) / tokens) ** 0.5,
        null_share=null[0],
        null_low=null[1],
        null_high=null[2],
        rounding_share=rounding[0],
        rounding_low=rounding[1],
        rounding_high=rounding[2],
        argmax_differs=float(differs_N[known].double().mean()) if known.any() else 0.0,
        by_position=by_position(gap_N, step_N, known, rollouts.offsets),
        growth=growth(gap_N, known, rollouts.offsets),
        largest=_largest(rungs, step_N, known, rollouts),
        stats=measure(rungs["decode"], rungs[names[0]], rollouts.offsets, rollouts.loss_mask),
    )


def _step(cause: str, step_N: Tensor, gap_N: Tensor, known: Tensor, offsets: Tensor) -> Step:
    k1, k1_error = _ratio_of_sums(step_N, known.double(), offsets)
    return Step(
        cause,
        *_share(step_N * gap_N, gap_N, offsets),
        k1,
        k1 - 1.96 * k1_error,
        k1 + 1.96 * k1_error,
        rms=(float(step_N.square().sum()) / max(1, int(known.sum()))) ** 0.5,
    )


def _share(part_N: Tensor, gap_N: Tensor, offsets: Tensor) -> tuple[float, float, float]:
    """Of sum(gap^2), with its 95% interval."""
    share, error = _ratio_of_sums(part_N, gap_N.square(), offsets)
    return share, share - 1.96 * error, share + 1.96 * error


def _ratio_of_sums(part_N: Tensor, whole_N: Tensor, offsets: Tensor) -> tuple[float, float]:
    """sum(part) / sum(whole) and its standard error over responses, linearised as in `mismatch.measure`."""
    part_B, whole_B = segment_sum(part_N, offsets), segment_sum(whole_N, offsets)
    whole, count = float(whole_B.sum()), len(part_B)
    if not whole:
        return 0.0, 0.0
    ratio = float(part_B.sum()) / whole
    error = float((part_B - ratio * whole_B).square().sum().sqrt()) / whole if count > 1 else 0.0
    return ratio, error * (count / max(1, count - 1)) ** 0.5


def by_position(gap_N: Tensor, step_N: dict[str, Tensor], known: Tensor, offsets: Tensor, bins: int = 7) -> list[dict]:
    """Bins that double in width: what grows with the position shows in the later ones."""
    place_N = _places(offsets)
    longest = int(offsets.diff().max())
    edges = sorted({0, *(round(longest / 2**power) for power in range(bins))})
    found = []
    for low, high in zip(edges, edges[1:]):
        inside = known & (place_N >= low) & (place_N < high)
        tokens = int(inside.sum())
        if tokens:
            mean, error = _ratio_of_sums(gap_N.abs() * inside, inside.double(), offsets)
            parts = {cause: float(values[inside].abs().mean()) for cause, values in step_N.items()}
            interval = {"log_rho_abs_mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}
            found.append({"from": low, "to": high, "tokens": tokens, **interval, "step_abs_mean": parts})
    return found


def growth(gap_N: Tensor, known: Tensor, offsets: Tensor) -> dict[str, float]:
    """Slope of |gap| over log2(1 + position). 0 within the interval: no growth to be seen."""
    x_N = (1 + _places(offsets)).double().log2()
    count = max(1, int(known.sum()))
    x_N = torch.where(known, x_N - float(x_N[known].sum()) / count, 0)
    y_N = torch.where(known, gap_N.abs() - float(gap_N[known].abs().sum()) / count, 0)
    slope, error = _ratio_of_sums(x_N * y_N, x_N.square(), offsets)
    return {"per_doubling": slope, "low": slope - 1.96 * error, "high": slope + 1.96 * error}


def _places(offsets: Tensor) -> Tensor:
    """Position of each token in its response, from 0."""
    return torch.arange(int(offsets[-1])) - offsets[:-1][segment_ids(offsets)]


def _largest(
    rungs: dict[str, Tensor], step_N: dict[str, Tensor], known: Tensor, rollouts: Rollouts, count: int = 8
) -> list[dict]:
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
                "step": max(step_N, key=lambda cause: abs(float(step_N[cause][place]))),
                **{name: float(values[place]) for name, values in rungs.items()},
            }
        )
    return found


def context(found: dict, rollouts: Rollouts, tokenizer, before: int = 12, after: int = 4) -> list[str]:
    """The text before one of `Ladder.largest`, its own, and the text after it."""
    response, place = rollouts.response(found["row"]).tolist(), found["position"]
    parts = (
        response[max(0, place - before) : place],
        response[place : place + 1],
        response[place + 1 : place + 1 + after],
    )
    return [tokenizer.decode(part) for part in parts]


def text_around(found: dict, rollouts: Rollouts, tokenizer) -> str:
    """The same in one line, the token itself between guillemets."""
    left, token, right = context(found, rollouts, tokenizer)
    return f"{left}«{token}»{right}"
