"""A flipped answer as HTML: both engines' texts side by side, what they share faint, the first difference marked."""

from __future__ import annotations

import html

from trueup.evaluate.divergence import Divergence, Flip, first_difference
from trueup.evaluate.records import Answer
from trueup.report.tokentext import visible

_SHARED = 400  # characters of the common beginning that are shown: its end, where the two part
_REST = 3000  # characters shown after the first difference
_QUESTION = 1500
_DOT = " \u00b7 "

STYLE = """
.sides{display:grid;grid-template-columns:1fr 1fr;gap:12px 18px;margin:8px 0 4px}
.side{min-width:0;border:1px solid var(--rule);border-top:3px solid var(--faint);border-radius:8px;padding:8px 12px}
.side.right{border-top-color:var(--ok)}.side.wrong{border-top-color:var(--fault)}
.side h4{text-transform:none;letter-spacing:0;font-size:13px;margin:0 0 4px;color:var(--ink)}
.side .written{white-space:pre-wrap;overflow-wrap:anywhere;font-size:13.5px;line-height:1.6}
.shared{color:var(--faint)}
mark.parts{background:rgba(var(--plus),.3);box-shadow:inset 0 -2px 0 currentColor;padding:0 1px}
mark.end{color:var(--faint);font-style:italic}
.side .facts{font-size:13px;color:var(--faint);margin:6px 0 0}
.checks,.said{list-style:none;margin:8px 0;padding:0;display:grid;gap:8px}
.checks li{display:grid;grid-template-columns:6.6em 11em 1fr;gap:0 12px;align-items:baseline}
.checks li>*,.said li{min-width:0;overflow-wrap:anywhere}
.results th,.results td{padding-right:14px}.results th{white-space:normal;vertical-align:bottom}
.results tbody th{color:var(--ink);min-width:9.5em;overflow-wrap:anywhere}
@media (max-width:640px){.sides{grid-template-columns:1fr}.checks li{grid-template-columns:6.6em 1fr}.checks li>:last-child{grid-column:1/-1}}
"""


def flip_block(flip: Flip, found: Divergence, rank: int) -> str:
    pair = flip.pair
    facts = [
        f"{'gained' if flip.gained else 'lost'} in {html.escape(found.second)}",
        f"through <b>{flip.kind}</b>",
        *([f"they part at {flip.at + 1:,} ({found.unit})"] if flip.at is not None and found.unit != "choices" else []),
        *([_CALLS[flip.call]] if flip.call in _CALLS else []),
        f"<span class='rank'>{visible(_short(pair.item.question))}</span>",
    ]
    question = visible(_cut(pair.item.question, _QUESTION))
    at = first_difference(pair.first.text, pair.second.text)
    sides = _side(found.first, pair.first, at, pair) + _side(found.second, pair.second, at, pair)
    sample = f", answer {pair.sample + 1}" if len(pair.item.answers) > 1 else ""
    return (
        f'<details class="response"{" open" if rank == 1 else ""}><summary><span class="rank">{rank}</span>'
        f"<span>{_DOT.join(facts)}</span></summary>"
        f'<h4>Question</h4><div class="prompt"><bdi>{question}</bdi></div>'
        f"<h4>Reference: {visible(_cut(pair.item.reference, 200))}{sample}</h4>"
        f'<div class="sides">{sides}</div></details>'
    )


_CALLS = {"tie": "a near-tie", "noise": "within this pair's noise", "disagreement": "a real disagreement"}


def _side(name: str, answer: Answer, at: int | None, pair) -> str:
    right = answer.correct >= max(pair.first.correct, pair.second.correct)
    badge = '<span class="badge ok">\u2713 right</span>' if right else '<span class="badge fault">\u2715 wrong</span>'
    facts = [
        f"read as {visible(_cut(answer.extracted, 80))}" if answer.extracted is not None else "no answer could be read",
        f"{len(answer.ids):,} tokens" if answer.ids is not None else f"{len(answer.text):,} characters",
        *([f"ended by {html.escape(answer.finish_reason)}"] if answer.finish_reason else []),
        *([f"lead {_lead(answer, pair)} nats where they part"] if _lead(answer, pair) else []),
    ]
    return (
        f'<div class="side {"right" if right else "wrong"}"><h4>{html.escape(name)} {badge}</h4>'
        f'<div class="written"><bdi>{_written(answer.text, at)}</bdi></div><p class="facts">{_DOT.join(facts)}</p></div>'
    )


def _lead(answer: Answer, pair) -> str:
    """By how much this engine preferred its own token where the two part."""
    if pair.first.ids is None or pair.second.ids is None or not answer.margins:
        return ""
    at = first_difference(pair.first.ids, pair.second.ids)
    return f"{answer.margins[at]:.3g}" if at is not None and at < len(answer.margins) else ""


def _written(text: str, at: int | None) -> str:
    """The text with its first difference, at character `at`, marked to the end of that word."""
    if at is None:
        return visible(text)
    shared, rest = text[:at], text[at:]
    hidden = (
        f'<span class="elided">[{len(shared) - _SHARED:,} characters the same]</span>' if len(shared) > _SHARED else ""
    )
    faint = f'{hidden}<span class="shared">{visible(shared[-_SHARED:])}</span>'
    if not rest:
        return f'{faint}<mark class="parts end">[ends here]</mark>'
    word = len(rest) - len(rest.lstrip())
    while word < len(rest) and not rest[word].isspace():
        word += 1
    word = min(word, 60)
    after = rest[word : word + _REST]
    left = len(rest) - word - len(after)
    more = f'<span class="elided">[{left:,} characters more]</span>' if left else ""
    return f'{faint}<mark class="parts">{visible(rest[:word])}</mark>{visible(after)}{more}'


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 90 else words[:88] + "\u2026"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "\u2026"
