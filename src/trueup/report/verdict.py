"""The statistics in words: is the gap of a healthy size? Causes are named in `causes.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from trueup.report.gathered import Gathered
from trueup.report.scale import number

# KL(mu||pi) in nats a token that is usual between engines at equal weights; docs/metrics.md.
_USUAL_KL, _USUAL_KL_QUANTISED = 1e-3, 1e-2
_QUANTISED = ("int8", "int4", "fp8", "fp4", "w8a8", "w4a16", "awq", "gptq", "nf4")
# Beyond this many times the usual size no kernel explains it.
_TOO_MANY_TIMES = 3
# The 95% interval of E[rho] leaves out 1 in one healthy dump of twenty. To alarm, a distance from 1 must be this many
# standard errors (1 in 5,000) and large enough to matter.
_ALARM_ERRORS, _ALARM_DISTANCE = 3.7, 1e-3
# Log-probs stored in bf16 or float32 move E[rho] by about this much; a large dump shows it.
_ROUNDING = 1e-4
_STEP_STATS = ("kl_k3", "ess_token", "ess_sequence", "rho_mean_low", "rho_mean_high")


@dataclass
class Finding:
    """One line under the headline."""

    level: str
    """`ok`, `look` (worth knowing, not a fault) or `fault`."""
    what: str
    text: str


@dataclass
class Verdict:
    healthy: bool | None
    """None: there was nothing to judge."""
    headline: str
    findings: list[Finding] = field(default_factory=list)
    causes: list[dict] = field(default_factory=list)
    """As `trueup explain` gives them, faults first."""


def verdict(gathered: Gathered, cut: float | None = None) -> Verdict:
    """Judge the sizes of the mismatch statistics.

    Args:
        gathered: the rollouts' statistics.
        cut: share of the tokens that the run's correction truncated or dropped; None: not known.
    """
    stats = {name.removeprefix("mismatch/"): value for name, value in gathered.stats().items()}
    if not gathered.tokens:
        return Verdict(None, "No verdict: no token has both log-probabilities.", _coverage(gathered, stats))
    engines = {setting[0] for setting in gathered.settings}
    return _spoken(
        [
            _ratio(gathered, stats),
            _size(stats["kl_k3"], engines),
            _effective(stats["ess_token"], stats["ess_sequence"]),
            *([] if cut is None else [_cut(cut)]),
            *_coverage(gathered, stats),
        ]
    )


def verdict_of_steps(metrics: list[dict], engine: str, cut: float | None = None) -> Verdict:
    """The same from metrics.jsonl alone, for a run that kept no rollouts: medians over its steps."""
    columns = [[row.get(f"mismatch/{name}") for row in metrics] for name in _STEP_STATS]
    rows = [row for row in zip(*columns) if all(isinstance(value, (int, float)) for value in row)]
    if not rows:
        return Verdict(None, "No verdict: neither rollouts nor mismatch statistics were logged.")
    kl, token, sequence, lows, highs = (list(column) for column in zip(*rows))
    return _spoken(
        [
            _ratio_of_steps(sum(not low <= 1 <= high for low, high in zip(lows, highs)), len(rows)),
            _size(median(kl), {engine}, "median over the steps"),
            _effective(median(token), median(sequence)),
            *([] if cut is None else [_cut(cut)]),
        ]
    )


def _ratio_of_steps(outside: int, steps: int) -> Finding:
    said = f"its 95% interval leaves out 1 in {outside:,} of the {steps:,} steps; chance alone gives {steps / 20:.1f}"
    if outside <= steps / 20 + 3 * math.sqrt(steps * 0.05 * 0.95):  # three binomial standard deviations
        return Finding("ok", "E[rho]", f"{said}.")
    # Heavy tails make a step's interval too narrow now and then; a fault shows in far more steps than that.
    return Finding("fault" if outside > steps / 4 and outside > 3 else "look", "E[rho]", f"{said}.")


def _spoken(findings: list[Finding]) -> Verdict:
    faults = [finding.what for finding in findings if finding.level == "fault"]
    looks = [finding.what for finding in findings if finding.level == "look"]
    if faults:
        return Verdict(False, f"Not healthy: look at {_listed(faults)}.", findings)
    if looks:
        return Verdict(True, f"Healthy, with something to know about {_listed(looks)}.", findings)
    return Verdict(True, "Healthy: sampler and learner differ no more than engines at equal weights do.", findings)


def _ratio(gathered: Gathered, stats: dict) -> Finding:
    mean, low, high = stats["rho_mean"], stats["rho_mean_low"], stats["rho_mean_high"]
    half = float(gathered.ratio.means()[1][0])
    said = "{}, 95% interval [{}, {}]".format(*ratio_words(mean, low, high))
    if not math.isfinite(half):
        return Finding("look", "E[rho]", f"{said}: fewer than two responses, too few to tell whether it is 1.")
    if low <= 1 <= high:
        if half > 0.1:
            return Finding("look", "E[rho]", f"{said}: so wide that it says little; a few ratios carry everything.")
        return Finding("ok", "E[rho]", f"{said}: contains 1, as it must.")
    if abs(mean - 1) < _ROUNDING:
        return Finding("ok", "E[rho]", f"{said}: 1 but for rounding.")
    if abs(mean - 1) < _ALARM_DISTANCE:
        return Finding(
            "ok", "E[rho]", f"{said}: leaves out 1, but by less than {_ALARM_DISTANCE:g}, too little to matter."
        )
    if abs(mean - 1) > max(_ALARM_DISTANCE, _ALARM_ERRORS / 1.96 * half):
        return Finding(
            "fault",
            "E[rho]",
            f"{said}: leaves out 1 by far. The two sets of log-probs are not of the same distribution.",
        )
    return Finding("look", "E[rho]", f"{said}: leaves out 1, as it does in one healthy dump of twenty.")


def ratio_words(*values: float) -> list[str]:
    """A mean ratio and its interval (mean, low, high), with the digits that the interval leaves meaning to."""
    width = max(values) - min(values)
    if width > 1 or not math.isfinite(width):
        return [number(value) for value in values]
    digits = 6 if width < 1e-4 else 5 if width < 1e-3 else 4
    return [f"{value:.{digits}f}" for value in values]


def _size(kl: float, engines: set[str], over: str = "") -> Finding:
    engines = sorted(engines)
    quantised = any(mark in engine.lower() for engine in engines for mark in _QUANTISED)
    usual = _USUAL_KL_QUANTISED if quantised or "" in engines else _USUAL_KL
    named = (
        "an engine the data do not name" if engines in ([], [""]) else ", ".join(name or "unnamed" for name in engines)
    )
    shown = number(kl) if kl >= 100 else f"{kl:.2g}"
    said = f"{shown} nats a token (k3{', ' if over else ''}{over}); up to {usual:.0e} is usual for {named}".replace(
        "e-0", "e-"
    )
    if kl <= usual:
        return Finding("ok", "KL(mu, pi)", f"{said}.")
    times = kl / usual
    if times <= _TOO_MANY_TIMES:
        return Finding(
            "look", "KL(mu, pi)", f"{said}: {times:.1f} times that. Sharp or long outputs do this; watch it."
        )
    return Finding(
        "fault",
        "KL(mu, pi)",
        f"{said}: {f'{times:,.0f}' if times < 1000 else 'over 1,000'} times that, more than arithmetic explains.",
    )


def _effective(token: float, sequence: float) -> Finding:
    said = f"{token:.1%} of the tokens, {sequence:.1%} of the responses"
    if token < 0.5:
        return Finding("fault", "ESS", f"{said}: a few tokens carry all the weight.")
    if token < 0.9:
        return Finding("look", "ESS", f"{said}: bound the ratio (TIS) before you weight by it.")
    if sequence < 0.5:
        return Finding("look", "ESS", f"{said}: fine per token; do not weight whole responses by their product of rho.")
    lost = (
        "little is lost to the mismatch"
        if sequence >= 0.9
        else "little is lost token by token, more by whole responses"
    )
    return Finding("ok", "ESS", f"{said}: {lost}.")


def _cut(cut: float) -> Finding:
    said = f"{cut:.2%} of the tokens were truncated or dropped by the correction"
    if cut > 0.2:
        return Finding("fault", "the fraction cut", f"{said}: it is throwing the data away.")
    if cut > 0.05:
        return Finding("look", "the fraction cut", f"{said}; a few per mille is usual.")
    return Finding("ok", "the fraction cut", f"{said}.")


def _coverage(gathered: Gathered, stats: dict) -> list[Finding]:
    found, missing = [], stats.get("missing_fraction", 0.0)
    if missing > 0:
        sides = f"sampler {gathered.missing_sampler:,}, learner {gathered.missing_learner:,}"
        text = f"{missing:.2%} of the tokens lack a log-prob ({sides}) and are left out of everything here."
        found.append(Finding("fault" if missing > 1e-3 else "look", "missing log-probs", text))
    elif gathered.chosen_tokens:
        found.append(Finding("ok", "missing log-probs", "none."))
    if gathered.above_zero:
        text = f"{gathered.above_zero:,} tokens have one above 0, which no probability has: placeholders."
        found.append(Finding("fault", "invented log-probs", text))
    if gathered.unscored_responses:
        text = f"{gathered.unscored_responses:,} responses have no learner log-probs and are left out."
        found.append(Finding("look", "responses not scored", text))
    if gathered.stale_tokens:
        share = gathered.stale_tokens / max(gathered.tokens, 1)
        text = f"{share:.1%} of the tokens were sampled by other weights than scored them: rho holds staleness too."
        found.append(Finding("look", "staleness", text))
    return found


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
