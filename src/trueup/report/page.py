"""The page: sections in the order a reader asks. Everything inline; nothing is fetched, and nothing else may run."""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from dataclasses import dataclass

from trueup.report.curves import curves
from trueup.report.distributions import gap_charts, ratio_distributions, step_charts
from trueup.report.gathered import Gathered
from trueup.report.ladder import ladder_section
from trueup.report.opening import header, verdict_box
from trueup.report.responses import largest_tokens, legend, response_block
from trueup.report.scale import number
from trueup.report.script import SCRIPT
from trueup.report.source import Source
from trueup.report.style import CSS
from trueup.report.tokentext import TokenText, visible
from trueup.report.verdict import Verdict, ratio_words

_MEANING = {
    "rho_mean": ("E[rho]", "1, whatever the noise"),
    "kl_k3": ("KL(mu, pi), k3, nats a token", "up to 1e-3 in bf16, 1e-2 in int8"),
    "kl_k1": ("KL(mu, pi), k1, nats a token", "near k3; may be negative"),
    "prob_diff_mean": ("mean |pi - mu|", "0.003 in bf16, 0.01 in int8 at 0.5B"),
    "prob_diff_max": ("largest |pi - mu|", "up to 0.4 in bf16, 1 in int8"),
    "log_rho_abs_mean": ("mean |log rho|, nats", ""),
    "log_rho_abs_max": ("largest |log rho|, nats", ""),
    "rho_max": ("largest rho", ""),
    "ess_token": ("effective share of tokens", "near 1"),
    "ess_sequence": ("effective share of responses", "near 1; below 0.5 half the batch is lost"),
    "missing_fraction": ("tokens without a log-prob", "0"),
    "tokens": ("tokens measured", ""),
}


@dataclass
class Part:
    """Rollouts that are judged together."""

    name: str
    """Empty where there is one part only."""
    gathered: Gathered
    judged: Verdict


def page(source: Source, parts: list[Part]) -> str:
    """The whole HTML document."""
    ladders = ladder_section(source.measured)
    verdicts = [verdict_box(part.name, part.judged, source) for part in parts]
    named = len(parts) > 1
    body = "".join(
        [
            header(source, [part.gathered for part in parts]),
            *(verdicts or [verdict_box("", _of_ladders_only(source), source)]),
            _curves(source),
            "" if source.run else ladders,
            *(_gap(source, part.gathered, part.name if named else "") for part in parts),
            ladders if source.run else "",
            *(_responses(source, part.gathered, part.name if named else "") for part in parts),
            *(_numbers(part.gathered, part.name if named else "") for part in parts),
            _configuration(source, [part.gathered for part in parts]),
        ]
    )
    # Only these two texts may act, whatever model output or a configuration may hold.
    policy = f"default-src 'none'; style-src {_hash(CSS)}; script-src {_hash(SCRIPT)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>trueup report: {visible(source.title)}</title><style>{CSS}</style></head>"
        f'<body><main>{body}</main><div id="tip" role="status" aria-live="polite" hidden></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _of_ladders_only(source: Source) -> Verdict:
    return Verdict(None, "No verdict on health: the rollouts of this ladder are not beside it. Its parts are below.")


def _heading(text: str, name: str) -> str:
    return f"<h2>{text}{': ' + html.escape(name) if name else ''}</h2>"


def _curves(source: Source) -> str:
    if not source.run:
        return ""
    if not source.metrics:
        return "<h2>Over the steps</h2><p>No step has been finished yet: metrics.jsonl is empty or absent.</p>"
    return f'<h2>Over the steps</h2><div class="figures">{"".join(curves(source.metrics))}</div>'


def _gap(source: Source, gathered: Gathered, name: str) -> str:
    if not gathered.tokens:
        why = "no rollouts have been written" if not gathered.responses else "no token has both log-probs"
        return f"{_heading('The gap', name)}<p>Nothing to show: {why}.</p>"
    figures = ratio_distributions(gathered, source.correction) + gap_charts(gathered)
    figures += [] if source.metrics else step_charts(gathered)
    return (
        f"{_heading('The gap', name)}<p>mu is the sampler's probability of a sampled token, pi the learner's at the weights that "
        "were delivered, and rho = pi / mu: 1, or log rho 0, where they agree. Raw ratios, before any correction. Whiskers and "
        "bands are 95% intervals over responses.</p>"
        f'<div class="figures">{"".join(figures)}</div>'
    )


def _responses(source: Source, gathered: Gathered, name: str) -> str:
    by_token, by_sum = gathered.worst_by_token.responses(), gathered.worst_by_sum.responses()
    if not by_token:
        return ""
    text = TokenText(source.tokenizer)
    note = "" if text.known else "<p>Token ids are shown: no tokenizer was found; give one with --tokenizer DIR.</p>"
    blocks = "".join(response_block(response, text, rank, rank == 1) for rank, response in enumerate(by_sum, 1))
    listed = {response.place for response in by_sum}
    others = [response for response in by_token if response.place not in listed]
    more = "".join(response_block(item, text, rank, False) for rank, item in enumerate(others, len(by_sum) + 1))
    more = f"<h3>And those with the largest single tokens</h3>{more}" if more else ""
    return (
        f"{_heading('The worst responses', name)}{note}<h3>Largest single tokens</h3>{largest_tokens(by_token, text)}"
        f"<h3>Responses with the largest sum of |log rho|</h3>{legend()}{blocks}{more}"
    )


def _numbers(gathered: Gathered, name: str) -> str:
    if not gathered.chosen_tokens:
        return ""
    stats = gathered.stats()
    rows = []
    for statistic, (what, healthy) in _MEANING.items():
        value = stats.get(f"mismatch/{statistic}")
        if value is None:
            continue
        shown = f"{value:,.0f}" if statistic == "tokens" else number(value)
        if statistic == "rho_mean":
            low, high = stats["mismatch/rho_mean_low"], stats["mismatch/rho_mean_high"]
            words = ratio_words(value, low, high)
            shown = f"{words[0]} [{_datum('rho_mean_low', low, words[1])}, {_datum('rho_mean_high', high, words[2])}]"
        rows.append(
            f'<tr><td>{what}</td><td class="number">{_datum(statistic, value, shown)}</td>'
            f"<td>{healthy}</td><td><code>mismatch/{statistic}</code></td></tr>"
        )
    head = "".join(
        f'<th scope="col">{word}</th>' for word in ("statistic", "value", "healthy", "name in metrics.jsonl")
    )
    return (
        f'{_heading("The numbers", name)}<div class="wide" tabindex="0"><table class="stats"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _datum(name: str, value: float, shown: str) -> str:
    """The full value beside the rounded one, for whoever reads the page with a program."""
    return f'<data data-name="mismatch/{name}" value="{value!r}">{shown}</data>'


def _configuration(source: Source, gathered: list[Gathered]) -> str:
    rows = []
    settings = sum((one.settings for one in gathered), Counter())
    for (engine, temperature, top_p, top_k, min_p), count in settings.most_common(12):
        cells = (engine or "not named", f"{temperature:.4g}", f"{top_p:.4g}", f"{top_k}", f"{min_p:.4g}", f"{count:,}")
        rows.append("<tr>" + "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in cells) + "</tr>")
    heads = ("engine", "temperature", "top_p", "top_k", "min_p", "responses")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    sampling = (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        if rows
        else ""
    )
    config = (
        f'<h3>config.yaml</h3><pre class="columns">{visible(source.config_text).replace(chr(0x21B5), "")}</pre>'
        if source.config_text
        else ""
    )
    correction = f"<p>Correction: {html.escape(str(source.correction))}.</p>" if source.correction else ""
    return (
        f"<h2>How it was made</h2>{sampling}{correction}<h3>To make it again</h3>"
        f"<pre>{visible(source.command)}</pre>{config}"
    )
