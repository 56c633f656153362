"""What a correction is: one orthogonal description, `Correction`, and its filters."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

_CHOICES = {
    "level": ("token", "sequence", "geometric", "none"),
    "bound": ("truncate", "mask", "none"),
    "anchor": ("learner", "sampler"),
    "criterion": ("ratio", "k1", "k2", "k3", "prob_diff"),
    "aggregate": ("token", "sum", "mean", "max"),
    "advantage": ("any", "negative", "positive"),
}


def nearest(name, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name).lower().replace("_", "-"), list(choices), n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else ""


def _check_fields(owner, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value not in _CHOICES[name]:
            valid = ", ".join(_CHOICES[name])
            raise ValueError(f"{name}={value!r} is unknown{nearest(value, _CHOICES[name])}; valid: {valid}")
    for name in ("low", "high"):
        try:
            object.__setattr__(owner, name, float(getattr(owner, name)))
        except (TypeError, ValueError):
            raise ValueError(f"{name}={getattr(owner, name)!r} is not a number") from None


def known_fields(given: Mapping, kind: type) -> dict:
    names = [field.name for field in fields(kind)]
    for name in given:
        if name not in names:
            raise ValueError(f"{kind.__name__.lower()} has no field {name!r}{nearest(name, names)}; fields: {names}")
    return dict(given)


@dataclass(frozen=True)
class Filter:
    """Drops what lies outside [low, high] of a criterion, judged on raw ratios, whatever the weights are."""

    criterion: str = "ratio"
    """`ratio`: rho. `k1`: -log rho. `k2`: (log rho)^2 / 2. `k3`: rho - 1 - log rho. `prob_diff`: pi_old - mu, signed.
    The k are in nats, and estimate KL(mu||pi_old) when averaged."""
    aggregate: str = "token"
    """`token`: each token for itself. `sum`, `mean`, `max`: over the response, which is then dropped whole. A ratio is
    aggregated in log space: its sum is the product of rho, its mean the geometric mean."""
    low: float = -math.inf
    """Smallest value that passes, in the criterion's unit; -inf: no limit."""
    high: float = math.inf
    """Largest value that passes; inf: no limit."""
    advantage: str = "any"
    """Which tokens it may drop, by the sign of their advantage. `any`. `negative`: those below 0; learning from a failure
    that the learner would hardly have produced is what destabilises (DeepSeek-V3.2, arXiv 2512.02556). `positive`: those
    above 0. One filter for each sign bounds a step in the direction it would go (DPPO, arXiv 2602.04879)."""

    def __post_init__(self):
        _check_fields(self, "criterion", "aggregate", "advantage")
        if not self.low <= self.high:
            raise ValueError(f"filter {self.criterion}: low={self.low} is above high={self.high}")

    def __str__(self) -> str:
        name = self.criterion if self.aggregate == "token" else f"{self.aggregate} {self.criterion}"
        what = "tokens" if self.aggregate == "token" else "responses"
        where = "" if self.advantage == "any" else f" where the advantage is {self.advantage}"
        return f"drop {what} with {name} outside [{self.low:g}, {self.high:g}]{where}"


@dataclass(frozen=True)
class Correction:
    """How the mismatch ratio becomes a weight and a mask. The default is TIS with C = 2."""

    level: str = "token"
    """`token`: rho_t. `sequence`: product of rho over the response. `geometric`: exp(mean log rho). `none`: 1."""
    bound: str = "truncate"
    """`truncate`: clamp into [low, high]. `mask`: drop outside [low, high], raw ratio inside. `none`: raw ratio."""
    low: float = 0.0
    """Lower bound of the ratio itself, at most 1; 0: none."""
    high: float = 2.0
    """Upper bound, at least 1: TIS's C. 2 is the published value for 0.5B models; 8 was used at 32B."""
    filters: tuple[Filter, ...] = ()
    """Each drops tokens or responses besides."""
    anchor: str = "learner"
    """`sampler`: the trainer takes the sampler's log-probs as pi_old inside the clip (PPO-IS, "bypass"); weights 1."""
    dropped_in_denominator: bool = False
    """Rejected tokens stay in the loss's denominator: each rejection then shrinks the step, as in TRL and IcePop."""

    def __post_init__(self):
        _check_fields(self, "level", "bound", "anchor")
        if self.anchor == "sampler" and self.level != "none":
            raise ValueError(f"anchor=sampler already puts rho inside the clip; level={self.level} applies it twice")
        # One spelling each, so that equal corrections compare equal.
        if self.level == "none":
            object.__setattr__(self, "bound", "none")
        if self.bound == "none":
            object.__setattr__(self, "low", 0.0)
            object.__setattr__(self, "high", math.inf)
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                f"bounds [{self.low:g}, {self.high:g}] do not contain 1: even exactly on-policy tokens would change; "
                "they bound the ratio itself, not its distance from 1"
            )
        object.__setattr__(self, "filters", tuple(self.filters))

    def __str__(self) -> str:
        ratio = {
            "token": "rho per token",
            "sequence": "product of rho per response",
            "geometric": "geometric mean of rho per response",
        }
        interval = f"[{self.low:g}, {self.high:g}]"
        bound = {"truncate": f"truncated into {interval}", "mask": f"dropped outside {interval}", "none": "unbounded"}
        if self.level == "none":
            weight = "weights 1" if self.anchor == "learner" else "sampler log-probs as pi_old inside the clip"
        else:
            weight = f"{ratio[self.level]}, {bound[self.bound]}"
        dropped = ["dropped tokens stay in the denominator"] if self.dropped_in_denominator else []
        return "; ".join([weight, *map(str, self.filters), *dropped])
