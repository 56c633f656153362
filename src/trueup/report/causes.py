"""The causes that `trueup explain` names, in words for the top of the page, together with the sizes of the statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trueup.explain.finding import FLOORS
from trueup.explain.verdict import explain
from trueup.report.verdict import Finding, Verdict

_SAID = {
    "precision": "ordinary rounding and kernels",
    "quantised": "ordinary quantisation",
    "temperature": "the two sides took different temperatures",
    "truncated-support": "top-p, top-k or min-p acted on one side only",
    "misaligned": "log-probs are shifted against their tokens",
    "placeholder": "some log-probs are invented values",
    "missing": "some log-probs are missing",
    "weights": "the sampler had other weights than the learner",
    "cache": "some prompts were cached under older weights",
    "retokenised": "the learner scored other tokens than were sampled",
    "observation": "tokens that the policy did not choose count in the loss",
    "prompt": "the learner scored under another prompt than was sampled from",
    "unknown": "the gap is larger than normal, and no known cause fits",
}
"""What each cause of `explain.finding.CAUSES` means, as the end of "Not healthy: ..."."""


def said(cause: str) -> str:
    return _SAID.get(cause, cause)


def judge(
    sizes: Verdict,
    files: list[Path],
    columns: str | None = None,
    progress: Callable[[int], None] | None = None,
    tokenizer: str | Path | None = None,
) -> Verdict:
    """`sizes` with the causes of the gap in `files` put first; a `tokenizer` proves re-tokenisation.

    The page must be written whatever a dump holds: where the causes cannot be told, the verdict stays one of sizes and
    says why.
    """
    if sizes.healthy is None:
        return sizes
    names = [str(file) for file in files]
    try:
        try:
            found = explain(names, columns, tokenizer and str(tokenizer), progress)
        except Exception:  # noqa: BLE001
            if tokenizer is None:
                raise
            found = explain(names, columns, None, progress)  # a tokenizer good enough to show text proves nothing
    except Exception as error:  # noqa: BLE001  see above; the reason is shown
        reason = Finding("look", "causes", f"could not be told: {str(error) or type(error).__name__}")
        headline = f"{sizes.headline} Causes could not be told."
        return replace(sizes, headline=headline, findings=[*sizes.findings, reason])
    return with_causes(sizes, found)


def with_causes(sizes: Verdict, found: dict) -> Verdict:
    """Merge what `explain` returned into a verdict of sizes."""
    faults = [cause for cause in found["causes"] if cause["cause"] not in FLOORS]
    floors = [cause for cause in found["causes"] if cause["cause"] in FLOORS]
    large = [finding.what for finding in sizes.findings if finding.level == "fault"]
    if faults:
        headline = "Not healthy: " + "; ".join(said(cause["cause"]) for cause in faults) + "."
    elif large:
        headline = (
            f"No known fault was found, but {_listed(large)} {'is' if len(large) == 1 else 'are'} beyond the usual."
        )
    else:
        ordinary = " and ".join(said(cause["cause"]) for cause in floors) or "the ordinary"
        headline = f"Healthy: nothing but {ordinary}."
    return Verdict(found["healthy"] and not large, headline, sizes.findings, faults + floors)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
