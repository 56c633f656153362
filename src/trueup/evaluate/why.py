"""Why engines differ: where every pair parts, and the checklist; in the terminal, as JSON and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueup.evaluate.checks import DIFFERS, NOTE, SAME, UNTESTED, Check, checklist
from trueup.evaluate.divergence import Divergence, diverge
from trueup.evaluate.page import EvaluationPage, in_words
from trueup.evaluate.prompts import Decode
from trueup.evaluate.records import Evaluation
from trueup.evaluate.verdict import points


@dataclass(frozen=True)
class Why:
    divergences: list[Divergence]
    """One a pair of the comparison, the null among them."""
    checks: list[Check]

    @property
    def causes(self) -> list[Check]:
        """What was found to differ and is no arithmetic."""
        return [check for check in self.checks if check.status == DIFFERS]

    def to_json(self) -> dict:
        return {
            "divergences": [divergence.to_json() for divergence in self.divergences],
            "checks": [check.to_json() for check in self.checks],
            "causes": [check.name for check in self.causes],
        }


def why(evaluations: Sequence[Evaluation], decode: Decode | None = None) -> Why:
    """decode: ids -> text with special tokens, for showing how prompts differ."""
    nulls = [
        (first, again)
        for again in evaluations
        if again.settings.get("run") == "again"
        for first in evaluations
        if first.settings.get("run") != "again" and _engine(first) == _engine(again)
    ]
    firsts = [one for one in evaluations if one.settings.get("run") != "again"]
    pairs = [(one, other) for place, one in enumerate(firsts) for other in firsts[place + 1 :]]
    rounding = nulls + [pair for pair in pairs if _rounds(*pair)]
    found = [diverge(*pair, rounding, null=True) for pair in nulls] + [diverge(*pair, rounding) for pair in pairs]
    return Why(found, checklist(firsts, decode) if len(firsts) > 1 else checklist(list(evaluations), decode))


def _engine(evaluation: Evaluation) -> tuple:
    return evaluation.settings.get("engine"), evaluation.settings.get("model")


def _rounds(one: Evaluation, other: Evaluation) -> bool:
    """Whether nothing but rounding should tell them apart: the same weights in the same float format. Two int8 engines may
    quantise in different ways."""
    precisions = {each.settings.get("precision") for each in (one, other)}
    models = {each.settings.get("model_sha256") or each.settings.get("model") for each in (one, other)}
    return precisions in ({"bf16"}, {"fp16"}, {"fp32"}) and len(models) == 1 and None not in models


def decoder(evaluations: Sequence[Evaluation], tokenizer: str | None = None) -> Decode | None:
    """By the tokenizer that is named, or that of the model evaluated; None where it cannot be had."""
    from trueup.learner.model import load_tokenizer

    name = tokenizer or next((one.settings["model"] for one in evaluations if "tokenizer_sha256" in one.settings), None)
    if name is None:
        return None
    try:
        known = load_tokenizer(name)
    except (OSError, ValueError):
        if tokenizer:
            raise
        return None
    return lambda ids: known.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def print_why(found: Why, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    console.print("\nWhy they differ", markup=False)
    for divergence in found.divergences:
        console.print(
            f"- {divergence.first} and {divergence.second}: {in_words(divergence)}", markup=False, soft_wrap=True
        )
        if divergence.flips:
            kinds = ", ".join(f"{count} {kind}" for kind, count in divergence.kinds().items())
            gained = sum(flip.gained for flip in divergence.flips)
            lost = len(divergence.flips) - gained
            console.print(
                f"  flipped answers: {gained} gained, {lost} lost; through {kinds}", markup=False, soft_wrap=True
            )
    table = Table(title="Causes that are no arithmetic", title_justify="left", title_style="", show_lines=False)
    table.add_column("", no_wrap=True)
    table.add_column("cause", no_wrap=True)
    table.add_column("what the results say")
    signs = {DIFFERS: "DIFFERS", NOTE: "note", UNTESTED: "untested", SAME: "same"}
    for check in found.checks:
        words = check.evidence
        if check.remedy and check.status in (DIFFERS, NOTE):
            words += f"\n-> {check.remedy}"
        style = {DIFFERS: "bold red", NOTE: "yellow"}.get(check.status, "")
        table.add_row(Text(signs[check.status], style=style), Text(check.name), Text(words))
    console.print(table)


def write_page(path: str | Path, evaluations: Sequence[Evaluation], comparison: dict, found: Why) -> Path:
    """comparison: of `compare`."""
    first = evaluations[0].settings
    samples = comparison["samples"]
    answers = "one answer each" if samples == 1 else f"{samples} answers each"
    title = " on ".join(str(first[name]) for name in ("model", "task") if first.get(name)) or "results made elsewhere"
    verdicts = [pair["verdict"] for pair in comparison["pairs"] if not pair["null"]]
    verdicts += [pair["verdict"] for pair in comparison["pairs"] if pair["null"]]
    shown = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "seed", "batch")
    settings = [(name, str(first[name])) for name in shown if first.get(name) not in (None, [])]
    settings += [(name, str(version)) for name, version in (first.get("versions") or {}).items()]
    page = EvaluationPage(
        title=title,
        facts=f"{comparison['items']:,} problems, {answers}",
        headline=_headline(comparison),
        verdicts=[text if text.endswith(".") else f"{text}." for text in verdicts],
        level="fault" if found.causes else "look" if any(pair["resolved"] for pair in comparison["pairs"]) else "ok",
        engines=[_engine_row(row) for row in comparison["engines"]],
        pairs=[_pair_row(row) for row in comparison["pairs"]],
        divergences=found.divergences,
        checks=found.checks,
        settings=settings,
    )
    return page.write(path)


def _headline(comparison: dict) -> str:
    pairs = [pair for pair in comparison["pairs"] if not pair["null"]]
    resolved = [pair for pair in pairs if pair["resolved"]]
    if not pairs:
        return "One engine, run twice" if comparison["pairs"] else "One engine: nothing to compare it with"
    if len(pairs) == 1:
        return pairs[0]["verdict"].partition("; ")[0]
    if not resolved:
        return f"No difference resolved in any of {len(pairs)} pairs on {comparison['items']:,} problems"
    named = ", ".join(f"{pair['a']} and {pair['b']}" for pair in resolved)
    return f"{len(resolved)} of {len(pairs)} pairs differ: {named}"


def _engine_row(row: dict) -> dict[str, str]:
    passes = {f"pass@{k}": f"{found['value']:.1%}" for k, found in list(row["pass_at_k"].items())[1:]}
    return {
        "engine": row["name"],
        "accuracy": f"{row['accuracy']:.1%}",
        "95% interval": f"{100 * row['low']:.1f} to {row['high']:.1%}",
        **passes,
        f"mean length, {row['length_unit']}": f"{row['mean_length']:.1f}",
        "truncated": "-" if row["truncated"] is None else f"{row['truncated']:.1%}",
        "tokens/s": "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
    }


def _pair_row(row: dict) -> dict[str, str]:
    only = ("only_a", "only_b") if "only_a" in row else ("better_a", "better_b")
    return {
        "pair": f"{row['a']} \u2192 {row['b']}",
        "lost": f"{row[only[0]]:,}",
        "gained": f"{row[only[1]]:,}",
        "difference, points": points(row["difference"], True),
        "95% interval": f"{points(row['low'], True)} to {points(row['high'], True)}",
        "p, corrected": f"{row['p']:.2g} (null)" if row["null"] else f"{row['p_holm']:.2g}",
        "unseen under": "-" if row["minimum_detectable"] is None else points(row["minimum_detectable"]),
        "problems needed": "-" if row["items_needed"] is None else f"{row['items_needed']:,}",
        "identical": f"{row['identical']:.1%}",
    }
