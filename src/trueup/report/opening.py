"""The top of the page: what it is about, and the verdict in words."""

from __future__ import annotations

import html
from datetime import date

import trueup
from trueup.report.causes import said
from trueup.report.ladder import in_words
from trueup.report.source import Source
from trueup.report.tokentext import visible
from trueup.report.verdict import Verdict

_SIGNS = {"ok": "\u2713 ok", "look": "! look", "fault": "\u2715 fault"}
_TERMS = (
    "E[rho] is the mean of the learner's probability over the sampler's, 1 whatever the noise; KL(mu, pi) is how far the "
    "learner is from the sampler; ESS is the share of the data that is left when it is weighted by rho."
)
_HEAD_SIGNS = {"ok": "\u2713", "look": "!", "fault": "\u2715", "": "?"}


def header(source: Source, gathered: list) -> str:
    engines = sorted({setting[0] for one in gathered for setting in one.settings} - {""})
    engines = engines or [source.engine] if source.engine else engines
    engines = engines or [ladder["spec"] for ladder in source.measured.get("samplers", [])]
    steps = len(source.metrics) or len(set().union(*(one.steps for one in gathered)))
    responses, tokens = sum(one.responses for one in gathered), sum(one.tokens for one in gathered)
    facts = [
        ", ".join(engines),
        f"{steps:,} step{'s' if steps != 1 else ''}" if steps else "",
        f"{responses:,} responses" if responses else "",
        f"{tokens:,} tokens measured" if tokens else "",
        f"trueup {trueup.__version__}, {date.today().isoformat()}",
    ]
    listed = " \u00b7 ".join(html.escape(fact) for fact in facts if fact)
    return (
        f'<header><div><p class="eyebrow">trueup report</p><h1>{visible(source.title)}</h1><p class="sub">{listed}</p></div>'
        '<button id="theme" type="button" hidden>Theme</button></header>'
    )


def verdict_box(name: str, judged: Verdict, source: Source) -> str:
    """One box a part: what is wrong and what to do, then the sizes behind it."""
    level = _level(judged)
    title = f'<p class="eyebrow">{html.escape(name)}</p>' if name else ""
    causes = "".join(_cause(cause, rank) for rank, cause in enumerate(judged.causes))
    causes = f'<ul class="causes">{causes}</ul>' if causes else ""
    sizes = "".join(_size(item.level, item.what, item.text) for item in judged.findings)
    sizes += "".join(
        _size("ok", "measured parts", f"{'' if name else ladder['spec'] + ': '}{in_words(ladder)}.")
        for ladder in source.measured.get("samplers", [])
        if not name or ladder["spec"] == name
    )
    return (
        f'<section class="verdict {level}" aria-label="Verdict{" on " + html.escape(name) if name else ""}">{title}'
        f'<p class="headline"><span class="sign" aria-hidden="true">{_HEAD_SIGNS[level]}</span>'
        f"<span>{html.escape(judged.headline)}</span></p>{causes}"
        + (f'<ul class="sizes">{sizes}</ul>' if sizes else "")
        + "".join(f'<p class="small">{html.escape(text)}</p>' for text in (_learned(source.metrics), _TERMS) if text)
        + "</section>"
    )


def _level(judged: Verdict) -> str:
    if judged.healthy is None:
        return ""
    if judged.healthy:
        return "ok" if judged.causes or all(finding.level == "ok" for finding in judged.findings) else "look"
    known = judged.causes and not any(cause["cause"] not in ("precision", "quantised") for cause in judged.causes)
    return "look" if known else "fault"


def _size(level: str, what: str, text: str) -> str:
    badge = f'<span class="badge {level}">{_SIGNS[level]}</span>'
    return f"<li>{badge}<b>{html.escape(what)}</b><span>{html.escape(text)}</span></li>"


def _cause(cause: dict, rank: int) -> str:
    name = cause["cause"]
    ordinary = name in ("precision", "quantised")
    of = "of the tokens" if name == "missing" else "of the gap"
    share = f"{cause['share']:.0%}" if cause["share"] >= 0.01 else "below 1%"
    title = said(name)
    title = title[0].upper() + title[1:]
    lines = [("Why", cause["evidence"]), ("Where", cause["where"]), ("What to do", cause["remedy"])]
    if ordinary and rank:
        lines = lines[:1]  # beside a fault there is nothing to do about the floor
    lines = [line for line in lines if not (ordinary and line[1] == "all responses")]
    told = "".join(f"<div><dt>{what}</dt><dd>{html.escape(text)}</dd></div>" for what, text in lines)
    width = min(100.0, max(0.0, 100 * cause["share"]))
    return (
        f'<li class="cause {"ordinary" if ordinary else "fault"}"><div class="share"><b>{share}</b> {of}'
        f'<svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect class="track" width="100" height="6"/>'
        f'<rect class="fill" width="{width:.1f}" height="6"/></svg><span class="small">confidence {100 * cause["confidence"]:.4g}%'
        f'</span></div><div class="told"><h2>{html.escape(title)} <code>{html.escape(name)}</code></h2><dl>{told}</dl></div></li>'
    )


def _learned(metrics: list[dict]) -> str:
    told = []
    for name, what in (("reward/mean", "mean reward"), ("eval/accuracy", "held-out accuracy")):
        found = [(row["step"], row[name]) for row in metrics if isinstance(row.get(name), (int, float))]
        if len(found) > 1:
            (first, before), (last, after) = found[0], found[-1]
            told.append(f"{what} {before:.3f} at step {first}, {after:.3f} at step {last}")
    return f"Training: {'; '.join(told)}." if told else ""
