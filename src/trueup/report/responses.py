"""The worst responses as HTML: every token coloured by log rho, its numbers shown when pointed at."""

from __future__ import annotations

import html
import math

from trueup.report.scale import number
from trueup.report.tokentext import TokenText, visible
from trueup.report.worst import Response

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""|log rho| at which a token takes the next stronger colour."""
_WINDOW = 400  # tokens shown of a response, around its worst one
_PROMPT = 300  # tokens shown of a prompt: its end, where the question is
_CONTEXT = 8


def legend() -> str:
    """The colours in words."""
    negative = "".join(f'<i class="n{index}">\u2212{step:g}</i>' for index, step in reversed(list(enumerate(STEPS, 1))))
    positive = "".join(f'<i class="p{index}">+{step:g}</i>' for index, step in enumerate(STEPS, 1))
    return (
        '<div class="scale tokens" role="note"><span>learner finds it less likely</span>'
        f"<span>{negative}<i>0</i>{positive}</span><span>more likely than the sampler</span></div>"
        '<p class="small">log rho of a token, in nats. Less likely is underlined too, more likely overlined. '
        '<i class="tokens"><i class="m">struck</i></i>: not in the loss mask. '
        '<i class="tokens"><i class="u">dotted frame</i></i>: no log-prob. Point at a token for its numbers, or focus a '
        "response and use the arrow keys.</p>"
    )


def largest_tokens(responses: list[Response], text: TokenText) -> str:
    """A table: the largest token of each response, with the text around it."""
    rows = []
    for response in responses:
        at, log_rho = response.peak, response.log_rho
        before = _one_line(response.ids[max(0, at - _CONTEXT) : at], text)
        after = _one_line(response.ids[at + 1 : at + 1 + _CONTEXT], text)
        token = f'<mark class="{_colour(log_rho[at])}">{_one_line([response.ids[at]], text)}</mark>'
        cells = (f"{log_rho[at]:+.3f}", f"{response.learner[at]:.3f}", f"{response.sampler[at]:.3f}", f"{at + 1:,}")
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f'<tr><td class="context"><bdi>{before}{token}{after}</bdi></td>{numbers}</tr>')
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("token in its text", "log rho", "log pi", "log mu", "position")
    )
    return f'<div class="wide" tabindex="0"><table class="peaks"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def response_block(response: Response, text: TokenText, rank: int, opened: bool) -> str:
    log_rho = response.log_rho
    measured = int((~_nan(log_rho)).sum())
    facts = [
        f"sum |log rho| <b>{response.total:.3f}</b>",
        f"largest <b>{log_rho[response.peak]:+.3f}</b> at {response.peak + 1:,}",
        f"mean log rho {float(log_rho[~_nan(log_rho)].mean()):+.4f}",
        f"{len(response.ids):,} tokens" + (f", {measured:,} measured" if measured < len(response.ids) else ""),
        *([f"{response.copies:,} times"] if response.copies > 1 else []),
        f"step {response.step}",
        *([f"reward {number(response.reward)}"] if math.isfinite(response.reward) else []),
        *(html.escape(word) for word in (response.finish_reason, response.engine, response.place) if word),
    ]
    listed = " \u00b7 ".join(facts)
    start = max(0, min(response.peak - _WINDOW // 2, len(response.ids) - _WINDOW))
    stop = min(len(response.ids), start + _WINDOW)
    tokens = "".join(
        _token(text, response.ids[at], at, response.learner[at], response.sampler[at], log_rho[at], response.chosen[at])
        for at in range(start, stop)
    )
    before, after = _left_out(start, "before"), _left_out(len(response.ids) - stop, "after")
    prompt_ids = response.prompt_ids[-_PROMPT:]
    prompt = "".join(visible(text(token)) for token in prompt_ids)
    cut = _left_out(len(response.prompt_ids) - len(prompt_ids), "before")
    asked = f'<h4>Prompt</h4><div class="prompt">{cut}<bdi>{prompt}</bdi></div>' if prompt_ids else ""
    return (
        f'<details class="response"{" open" if opened else ""}><summary><span class="rank">{rank}</span>'
        f"<span>{listed}</span></summary>"
        f'{asked}<h4>Response</h4><div class="tokens body" tabindex="0" role="group" aria-label="Response {rank}, '
        f'arrow keys move from token to token">{before}{tokens}{after}</div></details>'
    )


def _token(text: TokenText, token: int, at: int, learner: float, sampler: float, log_rho: float, chosen: bool) -> str:
    colour = "m" if not chosen else "u" if math.isnan(log_rho) else _colour(log_rho)
    css = f' class="{colour}"' if colour else ""
    numbers = "|".join([str(at + 1), str(token), *(_short(value) for value in (learner, sampler, log_rho))])
    return f'<i{css} data-n="{numbers}">{visible(text(token))}</i>'


def _one_line(ids: list[int], text: TokenText) -> str:
    return "".join(visible(text(token)) for token in ids).replace("\n", "")  # the sign of the break stays


def _colour(log_rho: float) -> str:
    strength = sum(abs(log_rho) >= step for step in STEPS)
    return f"{'p' if log_rho > 0 else 'n'}{strength}" if strength else ""


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "missing"


def _left_out(count: int, where: str) -> str:
    return f'<span class="elided">[{count:,} tokens {where}]</span>' if count > 0 else ""


def _nan(values):
    return values != values
