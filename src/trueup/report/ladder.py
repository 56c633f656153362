"""The ladder of `trueup measure`: the parts of the gap as bars that add up, its growth, its largest tokens."""

from __future__ import annotations

import html

from trueup.report.plot import WIDTH, Plot, numbers_table
from trueup.report.scale import Scale, number
from trueup.report.tokentext import visible

_ROW, _TOP, _SIDE = 37, 8, 12
_MEANING = {
    "learner precision": "the learner's bf16, against float32",
    "quantisation": "the sampler's quantisation, simulated",
    "kernels": "the engine's own order of sums",
    "decode and cache": "token by token, not all at once",
}


def ladder_section(measured: dict) -> str:
    """All samplers of one `trueup measure`; empty where none was measured."""
    if not measured:
        return ""
    asked = html.escape(f"{measured.get('model')} on {measured.get('task')}")
    return (
        f'<section aria-labelledby="ladder"><h2 id="ladder">Where it comes from</h2><p>Measured live: {asked}. The same tokens were '
        "scored on every rung from the learner's arithmetic to what the engine logged. Each bar begins where the one above "
        "ends, so that together they are the whole squared gap; a bar to the left undoes part of it. Whiskers are 95% "
        f"intervals over responses.</p>{''.join(map(_sampler, measured['samplers']))}</section>"
    )


def in_words(ladder: dict) -> str:
    """One sentence for the top of the page."""
    steps = sorted(ladder["steps"], key=lambda step: -step["share"])
    parts = ", ".join(f"{step['cause']} {step['share']:.0%}" for step in steps if step["share"] >= 0.005)
    return f"{parts}, of {ladder['tokens']:,} tokens scored on every rung"


def _sampler(ladder: dict) -> str:
    stats, growth = ladder["stats"], ladder["growth"]
    largest = max(ladder["steps"], key=lambda step: step["share"])
    grows = "grows" if growth["low"] > 0 else "shrinks" if growth["high"] < 0 else "shows no trend"
    said = (
        f"{ladder['tokens']:,} tokens; KL(mu, pi) {number(stats['mismatch/kl_k3'])} nats a token (k3). The largest part is "
        f"{largest['cause']}, {_percent(largest['share'], largest['share_low'], largest['share_high'])}. Learner and engine "
        f"rate another token highest at {ladder['argmax_differs']:.1%} of the positions. Along a response the gap {grows}: "
        f"{growth['per_doubling']:+.2g} nats a doubling of the position ({growth['low']:+.2g} to {growth['high']:+.2g})."
    )
    return (
        f'<h3>{html.escape(ladder["spec"])} against the bf16 learner</h3><p>{html.escape(said)}</p><div class="figures two">'
        f"{_waterfall(ladder)}{_along(ladder)}</div>{_tokens(ladder)}"
    )


def _rows(ladder: dict) -> list[tuple[str, str, float, float, float, bool]]:
    """(name, meaning, share, low, high, whether it is a null)."""
    rows = [
        (step["cause"], _MEANING.get(step["cause"], ""), step["share"], step["share_low"], step["share_high"], False)
        for step in ladder["steps"]
    ]
    null = (ladder["null_share"], ladder["null_low"], ladder["null_high"])
    rows.append(("null", "the engine against itself, other batch", *null, True))
    if ladder.get("rounding_share") is not None:
        rounding = (ladder["rounding_share"], ladder["rounding_low"], ladder["rounding_high"])
        rows.append(("null of kernels", "int8 simulated in two orders of sums", *rounding, True))
    return rows


def _waterfall(ladder: dict) -> str:
    rows = _rows(ladder)
    ends, reached = [], 0.0
    for _, _, share, low, high, null in rows:
        start = 0.0 if null else reached
        ends.append((start, start + share, start + low, start + high))
        reached = start + share
    scale = Scale(min(-0.02, *(min(row) for row in ends)), max(1.02, *(max(row) for row in ends)), percent=True)
    floor = _TOP + _ROW * len(rows)
    left = lambda value: round(_SIDE + scale.at(value) * (WIDTH - 2 * _SIDE), 1)  # noqa: E731
    parts = [
        f'<path class="grid" d="M{left(value)},{_TOP}V{floor}"/><text x="{left(value)}" y="{floor + 16}" '
        f'text-anchor="middle">{text}</text>'
        for value, text in scale.ticks()
    ]
    parts.append(f'<path class="axis" d="M{left(0)},{_TOP}V{floor}"/>')
    for index, ((name, meaning, share, low, high, null), (start, end, lowest, highest)) in enumerate(zip(rows, ends)):
        top = _TOP + index * _ROW
        what = f"{name}: {meaning}" if meaning else name
        parts.append(
            f'<text class="unit halo" x="{_SIDE}" y="{top + 12}"><tspan class="strong">{html.escape(name)}</tspan>'
        )
        parts.append(f'<tspan class="why" dx="6">{html.escape(meaning)}</tspan></text>')
        parts.append(
            f'<text class="unit strong halo" x="{WIDTH - _SIDE}" y="{top + 12}" text-anchor="end">{share:.0%}</text>'
        )
        x, width = min(left(start), left(end)), max(abs(left(end) - left(start)), 1.5)
        css = "part hollow" if null else "part back" if share < 0 else "part"
        parts.append(f'<rect class="{css} s{3 if null else 0}" x="{x}" y="{top + 17}" width="{width:g}" height="12">')
        parts.append(f"<title>{html.escape(what)}, {_percent(share, low, high)}</title></rect>")
        parts.append(
            f'<path class="whisker" d="M{left(lowest)},{top + 23}H{left(highest)}M{left(lowest)},{top + 20}v6M{left(highest)},{top + 20}v6"/>'
        )
        if not null and index + 1 < len(rows) and not rows[index + 1][-1]:
            parts.append(f'<path class="join" d="M{left(end)},{top + 29}v{_ROW - 12}"/>')
    label = "; ".join(f"{name} {share:.0%}" for name, _, share, _, _, _ in rows)
    table = [
        {
            "part": name,
            "share of the gap": f"{share:.1%}",
            "95% interval": f"{low:.1%} to {high:.1%}",
            **_of_step(ladder, name),
        }
        for name, _, share, low, high, _ in rows
    ]
    return (
        '<figure><figcaption><h3>Parts of the gap</h3></figcaption><svg class="plot still" role="img" '
        f'viewBox="0 0 {WIDTH} {floor + 40}" aria-label="Chart: parts of the gap. {html.escape(label)}">{"".join(parts)}'
        f'<text class="unit" x="{WIDTH / 2:g}" y="{floor + 34}" text-anchor="middle">share of the squared gap</text></svg>'
        f"<p>{_caption(ladder)}</p>{numbers_table(table)}</figure>"
    )


def _of_step(ladder: dict, name: str) -> dict[str, str]:
    step = next((step for step in ladder["steps"] if step["cause"] == name), None)
    if step is None:
        return {"rms log rho": number(ladder["null_rms"])} if name == "null" else {}
    return {
        "rms log rho": number(step["rms"]),
        "KL k1": f"{number(step['k1'])} ({number(step['k1_low'])} to {number(step['k1_high'])})",
    }


def _caption(ladder: dict) -> str:
    if ladder.get("rounding_share") is None:
        return "Hollow: what differs without any cause."
    return (
        "Hollow: what differs without any cause. Rounding activations to int8 magnifies last bits, so that two orders of "
        "sums differ as much as the second null; up to that size, kernels are int8&#x27;s doing."
    )


def _along(ladder: dict) -> str:
    rows = ladder["by_position"]
    if not rows:
        return ""
    centres = [((row["from"] + 1) * row["to"]) ** 0.5 for row in rows]
    causes = [step["cause"] for step in ladder["steps"]]
    highest = max(max(row["high"], row["log_rho_abs_mean"], *row["step_abs_mean"].values()) for row in rows)
    plot = Plot(
        "Growth with position",
        Scale(0.8, max(2.0, centres[-1] * 1.2), "log"),
        Scale(0, highest * 1.08 or 1.0),
        "position in the response (log)",
        "mean |difference|, nats",
    )
    for index, cause in enumerate(causes):
        plot.line(index, centres, [row["step_abs_mean"][cause] for row in rows], cause, markers=True)
    plot.line(4, centres, [row["log_rho_abs_mean"] for row in rows], "whole gap")
    plot.intervals(
        4, centres, [row["log_rho_abs_mean"] for row in rows], [row["high"] - row["log_rho_abs_mean"] for row in rows]
    )
    for at, row in zip(centres, rows):
        first, last = row["from"] + 1, row["to"]
        cells = {
            "position": f"{first}" if first == last else f"{first} to {last}",
            "whole gap": number(row["log_rho_abs_mean"]),
            "95% interval": f"{number(row['low'])} to {number(row['high'])}",
            **{cause: number(value) for cause, value in row["step_abs_mean"].items()},
            "tokens": f"{row['tokens']:,}",
        }
        plot.point(at, **cells)
    return plot.figure("Whiskers: 95% interval of the whole gap. Parts exceed it where they cancel.")


def _tokens(ladder: dict) -> str:
    rows = []
    for token in ladder["largest"]:
        pi, mu = token["bf16"], token["decode"]
        css = "p3" if pi > mu else "n3"
        before, middle, after = (visible(part) for part in token["context"])
        before, after = before.replace("\n", ""), after.replace("\n", "")  # the sign of the break stays
        text = f'{before}<mark class="{css}">{middle}</mark>{after}'
        cells = [f"{value:.3f}" for value in (token["prob_diff"], pi, mu)]
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(
            f'<tr><td class="context"><bdi>{text}</bdi></td>{numbers}<td>{html.escape(str(token.get("step", "")))}</td>'
            f'<td class="number">{token["position"] + 1:,}</td></tr>'
        )
    heads = ("token in its text", "|pi - mu|", "log pi", "log mu", "mostly", "position")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        '<h4>Largest single differences</h4><div class="wide" tabindex="0"><table class="peaks parts"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _percent(share: float, low: float, high: float) -> str:
    return f"{share:.0%} ({low:.0%} to {high:.0%})"
