"""One self-contained HTML page about an evaluation: the verdict, the tables, why engines differ, and the flipped answers side
by side. Style, script and charts are the report's."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

import trueup
from trueup.evaluate.checks import DIFFERS, NOTE, SAME, UNTESTED, Check
from trueup.evaluate.divergence import Divergence
from trueup.evaluate.flips import STYLE, flip_block
from trueup.report.plot import Plot
from trueup.report.scale import Scale, spanning
from trueup.report.script import SCRIPT
from trueup.report.style import CSS
from trueup.report.tokentext import visible

MOST_FLIPS = 60
"""Shown a pair; the page says how many there are beyond."""
_BINS = 24
_BADGES = {
    DIFFERS: ("fault", "\u2715 differs"),
    NOTE: ("look", "! note"),
    UNTESTED: ("", "? untested"),
    SAME: ("ok", "\u2713 same"),
}


@dataclass(frozen=True)
class EvaluationPage:
    """What the page says. Tables are rows of label -> text, so that the page and the terminal hold the same words."""

    title: str
    facts: str
    headline: str
    verdicts: Sequence[str]
    """A sentence a pair."""
    level: str
    """`ok`: no difference is resolved; `look`: one is; `fault`: a cause that is no arithmetic was found."""
    engines: Sequence[dict[str, str]]
    pairs: Sequence[dict[str, str]]
    divergences: Sequence[Divergence]
    checks: Sequence[Check]
    settings: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def write(self, path: str | Path) -> Path:
        """Under a temporary name first: a kill leaves the old page or the new one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.html(), encoding="utf-8")
        os.replace(temporary, path)
        return path

    def html(self) -> str:
        css = CSS + STYLE
        # Only these two texts may act, whatever a model wrote.
        policy = f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(SCRIPT)}"
        body = "".join(
            [
                self._header(),
                self._verdict(),
                _table("The engines", self.engines),
                _table("The pairs", self.pairs),
                self._checklist(),
                *(_divergence(divergence) for divergence in self.divergences),
                self._settings(),
            ]
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>trueup eval: {visible(self.title)}</title><style>{css}</style></head>"
            f'<body><main>{body}</main><div id="tip" role="status" aria-live="polite" hidden></div>'
            f"<script>{SCRIPT}</script></body></html>\n"
        )

    def _header(self) -> str:
        facts = f"{self.facts} \u00b7 trueup {trueup.__version__}, {date.today().isoformat()}"
        return (
            f'<header><div><p class="eyebrow">trueup eval</p><h1>{visible(self.title)}</h1>'
            f'<p class="sub">{html.escape(facts)}</p></div><button id="theme" type="button" hidden>Theme</button></header>'
        )

    def _verdict(self) -> str:
        found = [check for check in self.checks if check.status == DIFFERS]
        more = "".join(f"<li>{html.escape(text)}</li>" for text in self.verdicts)
        causes = "".join(
            f'<li><b class="badge fault">\u2715 {html.escape(check.name)}</b> {html.escape(check.evidence)}</li>'
            for check in found
        )
        sign = {"ok": "\u2713", "look": "!", "fault": "\u2715"}[self.level]
        return (
            f'<section class="verdict {self.level}" aria-label="Verdict"><p class="headline">'
            f'<span class="sign" aria-hidden="true">{sign}</span><span>{html.escape(self.headline)}</span></p>'
            f'<ul class="said">{causes}{more}</ul></section>'
        )

    def _checklist(self) -> str:
        rows = []
        for check in self.checks:
            level, badge = _BADGES[check.status]
            remedy = (
                f" \u2192 {html.escape(_sentence(check.remedy))}"
                if check.remedy and check.status in (DIFFERS, NOTE)
                else ""
            )
            rows.append(
                f'<li><span class="badge {level}">{badge}</span><b>{html.escape(check.name)}</b>'
                f"<span>{html.escape(_sentence(check.evidence))}{remedy}</span></li>"
            )
        if not rows:
            return ""
        return (
            "<h2>Causes that are no arithmetic</h2><p>Public reports of engines that score apart mostly end in one of these. "
            f'Each was tested on the results.</p><ul class="checks">{"".join(rows)}</ul>'
        )

    def _settings(self) -> str:
        if not self.settings:
            return ""
        rows = "".join(
            f"<tr><th scope='row'>{html.escape(name)}</th><td>{visible(value)}</td></tr>"
            for name, value in self.settings
        )
        return f'<h2>How it was made</h2><div class="wide"><table>{rows}</table></div>'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _sentence(text: str) -> str:
    """Not capitalised: many begin with the name of an engine."""
    return text + ("" if text.endswith((".", "?", "!")) else ".")


def _table(title: str, rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    lines = []
    for row in rows:
        first, *others = (html.escape(row.get(name, "")) for name in names)
        cells = "".join(f'<td class="number">{cell}</td>' for cell in others)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<h2>{title}</h2><div class="wide" tabindex="0"><table class="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _divergence(found: Divergence) -> str:
    head = (
        f"<h2>{html.escape(found.first)} against {html.escape(found.second)}</h2><p>{html.escape(in_words(found))}</p>"
    )
    figures = [figure for figure in (_positions(found), _moves(found)) if figure]
    drawn = f'<div class="figures two">{"".join(figures)}</div>' if figures else ""
    if not found.flips:
        return head + drawn
    kinds = ", ".join(f"{count} through {kind}" for kind, count in found.kinds().items())
    shown = found.flips[:MOST_FLIPS]
    more = f" The first {len(shown)} are shown." if len(shown) < len(found.flips) else ""
    blocks = "".join(flip_block(flip, found, rank) for rank, flip in enumerate(shown, 1))
    return f"{head}{drawn}<h3>Flipped answers</h3><p>{len(found.flips)}: {kinds}.{more}</p>{blocks}"


def in_words(found: Divergence) -> str:
    """How far the two are the same, in two sentences; also for a terminal."""
    what = {"tokens": "token for token", "characters": "character for character", "choices": "in the choice taken"}
    said = [
        f"{found.identical} of {found.responses} responses ({found.identical_share:.1%}) are the same {what[found.unit]}"
    ]
    if found.positions and found.unit != "choices":
        said[0] += f"; the others part after {np.median(found.positions):.0f} {found.unit} (median)"
    total = sum(found.calls.values())
    parts = [_counted(found.calls[call], *words) for call, words in _CALL_WORDS.items() if found.calls.get(call)]
    if parts and found.calls.get("unknown") != total:
        said.append(
            f"Of the {total} first differences, " + ", ".join(parts) if total > 1 else f"This one {parts[0][2:]}"
        )
    elif total:
        said.append("How close those calls were is not known: there are no margins")
    if found.tie_bound is not None and found.noise_bound is not None and not found.null:
        rounding = f"moves a margin by up to {found.tie_bound:.3g} nats" if found.tie_bound else "moves no margin"
        said.append(f"Rounding alone {rounding}; between these two it moves by up to {found.noise_bound:.3g}")
    return ". ".join(said) + "."


_CALL_WORDS = {
    "tie": ("is a near-tie that rounding decides", "are near-ties that rounding decides"),
    "noise": ("lies within this pair's usual noise", "lie within this pair's usual noise"),
    "disagreement": ("is a real disagreement", "are real disagreements"),
    "unknown": ("cannot be judged", "cannot be judged"),
}


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _positions(found: Divergence) -> str:
    if not found.positions or found.unit == "choices":
        return ""
    return _bars(
        "Where they part",
        found.positions,
        f"{found.unit} before the first difference",
        f"{found.identical} further responses do not part.",
        whole=True,
    )


def _moves(found: Divergence) -> str:
    moves = [move for move in found.moves if move is not None]
    if not moves:
        return ""
    bounds = [(found.tie_bound, "rounding"), (found.noise_bound, "this pair")]
    return _bars(
        "How close the call was",
        moves,
        "nats by which the two margins lie apart",
        "Left of the lines: what rounding moves by itself. Far to the right: the engines really disagree.",
        uprights=[(value, label) for value, label in bounds if value is not None],
    )


def _bars(title: str, values: Sequence[float], x_label: str, caption: str, uprights=(), whole: bool = False) -> str:
    high = max([*values, *(value for value, _ in uprights), 1e-6]) * 1.02
    step = max(1, -(-int(high + 1) // _BINS)) if whole else high / _BINS
    edges = np.arange(0, high + step, step)
    counts, _ = np.histogram(values, edges)
    plot = Plot(title, Scale(0.0, float(edges[-1])), spanning([0.0, float(counts.max())]), x_label, "responses")
    plot.bars(0, edges.tolist(), counts.tolist())
    for row, (value, label) in enumerate(uprights):
        plot.upright(value, label, row=row)
    for low, end, count in zip(edges, edges[1:], counts):
        span = (
            f"{low:.0f} to {end - 1:.0f}"
            if whole and step > 1
            else f"{low:.0f}"
            if whole
            else f"{low:.3g} to {end:.3g}"
        )
        plot.point((low + end) / 2, **{x_label: span, "responses": str(count)})
    return plot.figure(caption)
