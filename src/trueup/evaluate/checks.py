"""The checklist: causes of a difference that are no arithmetic. Each is tested on the evaluations as they are, made here or
elsewhere; what cannot be tested from them says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trueup.evaluate import causes
from trueup.evaluate.causes import DIFFERS, NOTE, SAME, UNTESTED, Check
from trueup.evaluate.prompts import Decode, doubled_start
from trueup.evaluate.records import Evaluation

__all__ = ["DIFFERS", "NOTE", "SAME", "UNTESTED", "Check", "checklist"]

MUCH_TRUNCATED = 0.05


def checklist(evaluations: Sequence[Evaluation], decode: Decode | None = None) -> list[Check]:
    """Every evaluation against the first, causes in the order in which public reports end in them; one line a cause where
    nothing differs, one line an engine where something does.

    decode: ids -> text, special tokens included; with it the prompts' differences are shown as text.
    """
    if not evaluations:
        return []
    first, others = evaluations[0], evaluations[1:]
    written = (
        [] if first.settings.get("kind") == "choice" else [causes.stops, causes.sampling, causes.length]
    )  # choices are not written
    tests: list[Callable[[Evaluation, Evaluation], list[Check]]] = [
        lambda one, other: causes.prompts(one, other, decode),
        causes.tokenizer,
        *written,
        causes.settings,
        causes.precision,
    ]
    found = list(_alone(evaluations))
    for test in tests:
        found += _merged([check for other in others for check in test(first, other)])
    return sorted(found, key=lambda check: (DIFFERS, NOTE, UNTESTED, SAME).index(check.status))


def _merged(checks: Sequence[Check]) -> Iterator[Check]:
    """Equal lines once; where a cause differs for one engine, that it is the same for another goes unsaid."""
    apart = {check.name for check in checks if check.status == DIFFERS}
    seen = set()
    for check in checks:
        if (check.name in apart and check.status != DIFFERS) or check in seen:
            continue
        if check.status in (SAME, UNTESTED) and any(other.name == check.name for other in seen):
            continue
        seen.add(check)
        yield check


def _alone(evaluations: Sequence[Evaluation]) -> Iterator[Check]:
    """What can be wrong with one evaluation, or with all in the same way."""
    for one in evaluations:
        if (doubled := doubled_start(one)) is not None:
            yield Check(
                "doubled BOS",
                DIFFERS,
                f"every prompt of {one.name} begins with the beginning-of-sequence token {doubled} twice",
                "the template holds it and the tokenizer adds it: tokenize the rendered text with add_special_tokens=False",
            )
    first = evaluations[0]
    if defaults := first.settings.get("generation_config"):
        said = ", ".join(f"{name}={value}" for name, value in defaults.items())
        yield Check(
            "generation_config",
            NOTE,
            f"the checkpoint asks for {said}. These engines were told otherwise; an engine that is given no settings "
            "(vLLM, transformers.generate, most servers) would apply it",
        )
    elif "generation_config" in first.settings:
        yield Check("generation_config", SAME, "the checkpoint's names nothing that changes sampling")
    cut = {one.name: causes.truncated(one) for one in evaluations}
    known = {name: share for name, share in cut.items() if share is not None}
    if known and max(known.values()) > MUCH_TRUNCATED:
        said = ", ".join(f"{name} {share:.1%}" for name, share in known.items())
        yield Check(
            "truncation",
            NOTE,
            f"responses cut at the length limit: {said}. A cut response is mostly a wrong one: the score then measures length",
            "raise --max-tokens until the share is small",
        )
