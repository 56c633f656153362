"""The causes themselves, each tested on two evaluations: a list of lines for the checklist."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from trueup.evaluate.divergence import first_difference, pairs_of
from trueup.evaluate.evidence import avoided_repetition, cut_support, different_stops, past_stop
from trueup.evaluate.prompts import Decode, compare_prompts
from trueup.evaluate.records import Evaluation

SAME, DIFFERS, NOTE, UNTESTED = "same", "differs", "note", "untested"
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "do_sample",
    "min_tokens",
    "samples",
)
OTHER = ("task", "num_fewshot", "fewshot_as_multiturn", "system_instruction", "task_version", "limit")
"""Settings that results made elsewhere may name; compared where both do."""


@dataclass(frozen=True)
class Check:
    """One cause, tested."""

    name: str
    status: str
    """`same`: tested, no difference; `differs`: found; `note`: no difference between these, but worth knowing;
    `untested`: the results do not hold what the test needs."""
    evidence: str
    remedy: str = ""

    def to_json(self) -> dict:
        return asdict(self)


def prompts(first: Evaluation, other: Evaluation, decode: Decode | None) -> list[Check]:
    names = ("doubled BOS", "system prompt", "chat template")
    try:
        found = compare_prompts(first, other, decode)
    except ValueError:
        needs = f"{first.name} or {other.name} holds no prompt ids"
        texts = [one.settings.get("prompt_texts_sha256") for one in (first, other)]  # what a harness logged
        if None in texts:
            return [Check(name, UNTESTED, needs, "results of trueup eval hold them") for name in names]
        if texts[0] != texts[1]:
            what = f"the prompt texts of {first.name} and {other.name} differ"
            return [Check("prompt", DIFFERS, what, "look at system message, template, few-shot examples and wording")]
        same = [Check(name, SAME, "the prompts are the same texts in both") for name in names[1:]]
        return [Check(names[0], UNTESTED, f"the prompts are the same texts, but {needs}"), *same]
    if found is None:
        sha = first.settings.get("prompts_sha256")
        proof = f"all {len(first.items)} prompts are the same ids in every engine" + (
            f", sha256 {sha[:12]}" if sha else ""
        )
        return [Check(name, SAME, proof) for name in names]
    return [
        Check(
            found.cause,
            DIFFERS,
            f"{found.count} of {found.compared} prompts differ: where {first.name} has {found.shown(found.ours, decode)}, "
            f"{other.name} has {found.shown(found.theirs, decode)}",
            _PROMPT_REMEDIES[found.cause],
        )
    ]


_PROMPT_REMEDIES = {
    "doubled BOS": "tokenize the rendered template with add_special_tokens=False, or hand over ids",
    "BOS": "one engine adds the beginning-of-sequence token, the other does not: hand over ids",
    "system prompt": "give both the same system message; a template may put in one of its own where none is given",
    "chat template": "use one template and render it once; look at the generation prompt at its end",
    "tokenizer": "the same text as other ids: use the checkpoint's own tokenizer in both, of one version",
    "prompt": "the questions themselves differ: few-shot examples, their order, or the wording",
}


def tokenizer(first: Evaluation, other: Evaluation) -> list[Check]:
    hashes = [one.settings.get("tokenizer_sha256") for one in (first, other)]
    if None not in hashes and hashes[0] != hashes[1]:
        what = f"the vocabularies of {first.name} and {other.name} differ"
        return [Check("tokenizer", DIFFERS, what, _PROMPT_REMEDIES["tokenizer"])]
    same_text = other_ids = 0
    for pair in pairs_of(first, other):
        if pair.first.ids is None or pair.second.ids is None:
            return [Check("tokenizer", UNTESTED, "no response ids, and no tokenizer named")] if None in hashes else []
        if pair.first.text and pair.first.text == pair.second.text:
            same_text += 1
            other_ids += not _same_but_for_the_end(pair.first.ids, pair.second.ids)
    if other_ids > max(2, 0.05 * same_text):
        what = f"{other_ids} of {same_text} equal texts of {first.name} and {other.name} are other ids"
        return [Check("tokenizer", DIFFERS, what, _PROMPT_REMEDIES["tokenizer"])]
    proof = "one vocabulary" if None not in hashes else f"{same_text} equal texts are the same ids"
    return [Check("tokenizer", SAME, proof)]


def _same_but_for_the_end(a: list[int], b: list[int]) -> bool:
    """One engine returns the stop token and another does not, or they stop at different ones: the same text all the same."""
    return bool({tuple(a), tuple(a[:-1])} & {tuple(b), tuple(b[:-1])})


def stops(first: Evaluation, other: Evaluation) -> list[Check]:
    remedy = "give both engines the same stop strings and stop ids"
    for name, what in (("stop", "stop strings"), ("stop_token_ids", "stop ids")):
        if name in first.settings and name in other.settings:
            one, two = (sorted(each.settings[name] or []) for each in (first, other))
            if one != two:
                return [Check("stop", DIFFERS, f"{what}: {first.name} has {one}, {other.name} has {two}", remedy)]
    if found := different_stops(first, other):
        if found.kept:
            what = f"{found.going} keeps {found.string!r} at the end of its texts, {found.stopping} cuts it ({found.count} responses)"
        else:
            what = (
                f"{found.stopping} stops at {found.string!r}, {found.going} goes on past it ({found.count} responses)"
            )
        return [Check("stop", DIFFERS, what, remedy)]
    stops = {token for one in (first, other) for token in one.settings.get("stop_token_ids") or []}
    for one in (first, other):
        if past := past_stop(one, stops):
            what = f"{one.name} goes on past the stop id {past[0]} in {past[1]} responses"
            return [Check("stop", DIFFERS, what, remedy)]
    known = "stop_token_ids" in first.settings and "stop_token_ids" in other.settings
    proof = (
        f"the same ids {first.settings['stop_token_ids']} and strings {first.settings.get('stop', [])}; "
        if known
        else ""
    )
    return [Check("stop", SAME, f"{proof}no response goes on where another engine's stops")]


def sampling(first: Evaluation, other: Evaluation) -> list[Check]:
    remedy = "set every sampling setting explicitly on both sides; a checkpoint's generation_config fills in what is left out"
    apart = [
        f"{name}: {first.name} {first.settings[name]}, {other.name} {other.settings[name]}"
        for name in SAMPLING
        if name in first.settings and name in other.settings and first.settings[name] != other.settings[name]
    ]
    defaults = first.settings.get("generation_config") or other.settings.get("generation_config") or {}
    said = ", ".join(f"{name}={value}" for name, value in defaults.items())
    hint = f"; the checkpoint's generation_config says {said}" if said else ""
    checks = []
    if apart:
        checks.append(Check("sampling settings", DIFFERS, "; ".join(apart) + hint, remedy))
    if _warm(first) and _warm(other) and (found := cut_support(first, other)):
        checks.append(
            Check(
                "generation_config" if defaults else "sampling settings",
                DIFFERS,
                f"{found.cut} drew {found.counts[0]} tokens of probability below {found.chance:.0e}, {found.full} "
                f"{found.counts[1]} (p = {found.p:.0e}): top-k, top-p, min-p or a lower temperature acts in {found.cut}{hint}",
                remedy,
            )
        )
    if found := avoided_repetition(first, other):
        checks.append(
            Check(
                "generation_config" if "repetition_penalty" in defaults else "sampling settings",
                DIFFERS,
                f"where they part, {found.avoiding} takes a token that was not there before and {found.other} a repeated one "
                f"{found.counts[0]} times, the reverse {found.counts[1]} times (p = {found.p:.0e}): a repetition penalty acts "
                f"in {found.avoiding}{hint}",
                remedy,
            )
        )
    if checks:
        return checks
    named = [name for name in SAMPLING if name in first.settings and name in other.settings]
    if not named:
        return [Check("sampling settings", UNTESTED, "the results name none, and show no sign of a difference")]
    proof = ", ".join(f"{name}={first.settings[name]}" for name in named)
    return [Check("sampling settings", SAME, f"{proof}; nothing in the answers contradicts it")]


def _warm(evaluation: Evaluation) -> bool:
    """Sampled, with log-probs."""
    sampled = evaluation.settings.get("temperature") != 0
    return sampled and any(answer.logprobs for item in evaluation.items for answer in item.answers)


def length(first: Evaluation, other: Evaluation) -> list[Check]:
    remedy = "give both engines the same limit; a context that is too short cuts it as well"
    limits = [one.settings.get("max_tokens") for one in (first, other)]
    if None not in limits and limits[0] != limits[1]:
        return [Check("max length", DIFFERS, f"{first.name} {limits[0]} tokens, {other.name} {limits[1]}", remedy)]
    cut = [_cut_lengths(one) for one in (first, other)]
    if cut[0] and cut[1] and max(cut[0]) != max(cut[1]):
        what = f"{first.name} cuts responses at {max(cut[0])} tokens, {other.name} at {max(cut[1])}"
        return [Check("max length", DIFFERS, what, remedy)]
    for one, lengths, across in ((first, cut[0], other), (other, cut[1], first)):
        # Many cut at one length, which the other engine's responses exceed without being cut.
        beyond = _longest(across)
        if len(lengths) >= 3 and beyond is not None and beyond > max(lengths):
            what = f"{one.name} cuts responses at {max(lengths)} tokens, {across.name} writes up to {beyond}"
            return [Check("max length", DIFFERS, what, remedy)]
    shares = [truncated(one) for one in (first, other)]
    if None in limits and None in shares:
        return [Check("max length", UNTESTED, "neither limits nor finish reasons are known")]
    proof = f"{limits[0]} tokens in both" if None not in limits else "no response is cut where the other's goes on"
    return [Check("max length", SAME, proof)]


def _cut_lengths(evaluation: Evaluation) -> list[int]:
    answers = [answer for item in evaluation.items for answer in item.answers]
    return [len(answer.ids) for answer in answers if answer.finish_reason == "length" and answer.ids is not None]


def _longest(evaluation: Evaluation) -> int | None:
    lengths = [len(answer.ids) for item in evaluation.items for answer in item.answers if answer.ids is not None]
    return max(lengths, default=None)


def settings(first: Evaluation, other: Evaluation) -> list[Check]:
    checks = []
    models = [one.settings.get("model_sha256") or one.settings.get("model") for one in (first, other)]
    if None in models:
        checks.append(Check("model", UNTESTED, "the results do not name it"))
    elif models[0] != models[1]:
        names = [one.settings.get("model") for one in (first, other)]
        weights = "other weights under one name" if names[0] == names[1] else f"{names[0]} and {names[1]}"
        checks.append(Check("model", DIFFERS, f"{first.name} and {other.name}: {weights}", "evaluate one checkpoint"))
    else:
        checks.append(Check("model", SAME, f"{first.settings.get('model')}, the same weights"))
    for name in OTHER:
        one, two = first.settings.get(name), other.settings.get(name)
        if name in first.settings and name in other.settings and one != two:
            checks.append(Check(name, DIFFERS, f"{first.name} {one!r}, {other.name} {two!r}", "make them the same"))
    return checks


def precision(first: Evaluation, other: Evaluation) -> list[Check]:
    one, two = (_precision_of(each) for each in (first, other))
    noise = _logprob_noise(first, other)
    said = f"; on tokens both wrote, log-probs differ by {noise:.4f} on average" if noise is not None else ""
    if one is None or two is None:
        return [Check("precision", UNTESTED, f"the results do not name it{said}")]
    if one != two:
        return [Check("precision", NOTE, f"{first.name} computes in {one}, {other.name} in {two}{said}")]
    status = NOTE if said and first.settings.get("engine") != other.settings.get("engine") else SAME
    return [Check("precision", status, f"{first.name} and {other.name} compute in {one}{said}")]


def _precision_of(evaluation: Evaluation) -> str | None:
    return evaluation.settings.get("precision") or evaluation.settings.get("dtype")


def _logprob_noise(first: Evaluation, other: Evaluation) -> float | None:
    """Mean |difference| of log-probs over the tokens before the first difference, where the contexts are the same."""
    found = []
    for pair in pairs_of(first, other):
        a, b = pair.first, pair.second
        if a.ids is None or b.ids is None or a.logprobs is None or b.logprobs is None:
            return None
        at = first_difference(a.ids, b.ids)
        for one, two in zip(a.logprobs[:at], b.logprobs[:at]):
            if one is not None and two is not None:
                found.append(abs(one - two))
    return float(np.mean(found)) if found else None


def truncated(evaluation: Evaluation) -> float | None:
    reasons = [answer.finish_reason for item in evaluation.items for answer in item.answers]
    return None if None in reasons or not reasons else reasons.count("length") / len(reasons)
