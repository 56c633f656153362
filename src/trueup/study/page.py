"""index.html of a study: what was found, curves, what the gap did, comparisons, and how to trace or repeat every number."""

from __future__ import annotations

import base64
import hashlib
import html

from trueup.report.script import SCRIPT
from trueup.report.style import CSS as REPORT_CSS
from trueup.study import charts, words
from trueup.study.results import OUTCOMES

CSS = REPORT_CSS + charts.CSS


def page(results: dict) -> str:
    """The whole HTML document. Only its own style and script may act, whatever names and texts the study holds."""
    body = "".join(
        [
            _header(results),
            _verdict(results),
            _arms(results),
            _curves(results),
            _gap(results),
            _comparisons(results),
            _listed("What could have been seen", words.resolution(results)),
            _listed("What the arms share", words.fairness(results)),
            _settings(results),
            _runs(results),
        ]
    )
    policy = f"default-src 'none'; style-src {_hash(CSS)}; script-src {_hash(SCRIPT)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>trueup study: {_text(results['title'])}</title><style>{CSS}</style></head>"
        f'<body><main>{body}</main><div id="tip" role="status" aria-live="polite" hidden></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value) -> str:
    return html.escape(str(value))


def _header(results: dict) -> str:
    facts = [
        f"{len(results['arms'])} arms, seeds {', '.join(map(str, results['seeds']))}",
        f"{results['steps']} steps of {', '.join(results['algorithms'])}",
        f"model {results['model']}, task {results['task']}",
        f"trueup {results['trueup']}, {results['made']}",
    ]
    said = " \u00b7 ".join(map(_text, facts))
    return (
        f'<header><div><p class="eyebrow">trueup study</p><h1>{_text(results["title"])}</h1>'
        f'<p class="sub">{said}</p></div>'
        '<button id="theme" type="button" hidden>Theme</button></header>'
        + (f"<p>{_text(results['question'])}</p>" if results["question"] else "")
    )


def _verdict(results: dict) -> str:
    found = words.findings(results)
    items = "".join(
        f'<li><span class="badge look">differs</span><b>{_text(what)}</b><span>{_text(text)}</span></li>'
        for what, text in found
    )
    css = "fault" if results["failed"] else ""
    return (
        f'<section class="verdict {css}" aria-label="Result"><p class="headline">{_text(words.headline(results))}</p><ul class="found">{items}</ul>'
        '<p class="small">A comparison differs where the paired t test over common seeds, adjusted by Holm over all comparisons '
        "of that outcome, gives p below 0.05. Not told apart does not mean equal: see what could have been seen.</p></section>"
    )


def _arms(results: dict) -> str:
    scales = {outcome: charts.forest_scale(results["arms"], outcome) for outcome in OUTCOMES}
    rows = []
    for arm in results["arms"]:
        cells = [f'<th scope="row">{_link(arm["config"], arm["name"])}</th><td class="number">{arm["done"]}</td>']
        for outcome in OUTCOMES:
            summary = arm["outcomes"].get(outcome)
            chart = charts.forest(summary, scales[outcome]) if outcome != "best" else ""
            cells.append(f'<td class="number">{words.spread(summary)}{chart}</td>')
        for name in (
            "mismatch/prob_diff_mean",
            "mismatch/kl_k3",
            "mismatch/ess_token",
            "mismatch/ess_sequence",
            "correction/cut",
        ):
            cells.append(f'<td class="number">{words.quantity(name, arm["measured"].get(name, {}).get("mean"))}</td>')
        costs = ("-", "-") if arm["seconds"] is None else (f"{arm['seconds']:,.0f} s", f"{arm['tokens']:,.0f}")
        cells += [f'<td class="number">{cost}</td>' for cost in costs]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    axes = {
        outcome: f'{name}<br><span class="small">{words.percent(scales[outcome].low)} to {words.percent(scales[outcome].high)}</span>'
        if outcome != "best"
        else name
        for outcome, name in OUTCOMES.items()
    }
    gaps = [
        words.SHORT[name]
        for name in ("mismatch/prob_diff_mean", "mismatch/kl_k3", "mismatch/ess_token", "mismatch/ess_sequence")
    ]
    head = ["arm", "seeds", *axes.values(), *gaps, words.SHORT["correction/cut"], "time a run", "tokens a run"]
    return (
        "<h2>The arms</h2><p>Held-out accuracy, greedy, of the learner's own weights, never of the sampler's: mean over seeds and "
        "its 95% Student interval, numbers in per cent. The area under the curve is the mean accuracy over the steps. mu is the "
        "sampler's probability of a sampled token, pi the learner's at the weights that were delivered; gap columns are means over "
        "steps, before any correction. Time is of the training steps alone.</p>"
        f"{_table(head, rows, raw=True)}"
    )


def _curves(results: dict) -> str:
    figures = list(charts.learning_curves(results))
    if not figures:
        return "<h2>Learning curves</h2><p>No arm has a finished run yet.</p>"
    figure = charts.against(results)
    head = f'<h2>Against the gap</h2><div class="figures">{figure}</div>' if figure else ""
    return (
        f"{head}<h2>Learning curves</h2><p>All charts share their axes. The band resamples seeds (bootstrap, 95%, each step by itself); "
        "of few seeds it is too narrow, which is why every seed is drawn.</p>"
        f"{charts.curve_legend(results)}"
        f'<div class="figures">{"".join(figures)}</div>'
    )


def _gap(results: dict) -> str:
    table = charts.sparklines(results)
    return (
        "<h2>Over the steps</h2><p>Mean over seeds and 95% bootstrap band. Each column has one scale, given at its head.</p>"
        + table
        if table
        else ""
    )


def _comparisons(results: dict) -> str:
    parts = ["<h2>Comparisons</h2>"]
    head = [
        "A",
        "B",
        "seeds",
        "A \u2212 B, points",
        "p, t",
        "Holm",
        "p, flip",
        "Holm",
        "detectable",
        "with Holm",
        "A is",
    ]
    for outcome, name in OUTCOMES.items():
        rows = []
        for row in results["comparisons"][outcome]:
            css = ' class="differs"' if words.differs(row) else ""
            numbers = [words.p_value(row.get(p)) for p in ("p_t", "p_t_holm", "p_flip", "p_flip_holm")]
            numbers += [words.points(row.get(limit)).lstrip("+") for limit in ("detectable", "detectable_holm")]
            cells = [words.difference(row), *numbers]
            rows.append(
                f'<tr{css}><th scope="row">{_text(row["a"])}</th><td>{_text(row["b"])}</td><td class="number">{len(row["seeds"])}</td>'
                + "".join(f'<td class="number">{cell}</td>' for cell in cells)
                + f"<td>{words.judged(row)}</td></tr>"
            )
        parts.append(f"<h3>{name.capitalize()}</h3>{_table(head, rows)}")
    return "".join(parts) + (
        '<p class="small">A \u2212 B in percentage points on common seeds, with the 95% Student interval. t: paired t test. flip: exact '
        "sign-flip permutation test. Each is two-sided, then adjusted by Holm over the table. Detectable: the true difference "
        "found with 80% power, for a comparison on its own and at Holm's strictest step.</p>"
    )


def _listed(title: str, sentences: list[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<h2>{title}</h2><ul>{items}</ul>" if sentences else ""


def _settings(results: dict) -> str:
    commands = "\n".join(words.rerun(results, arm, results["seeds"][0]) for arm in results["arms"])
    notes = f"<p>{_text(results['notes'])}</p>" if results["notes"] else ""
    return (
        f"<h2>To make it again</h2>{notes}<p>The whole study: <code>trueup study {_text(results['file'])} --out NEW</code>; one arm: add "
        "<code>--only ARM</code>. One run, in this folder, with any seed:</p>"
        f"<pre>{_text(commands)}</pre>"
    )


def _runs(results: dict) -> str:
    rows, failed = [], []
    for arm in results["arms"]:
        for run in arm["runs"]:
            outcomes = "".join(f'<td class="number">{words.percent(run.get(outcome))}</td>' for outcome in OUTCOMES)
            rows.append(
                f'<tr><th scope="row">{_text(arm["name"])}</th><td class="number">{_link(run["folder"] + "/", run["seed"])}</td>'
                f'<td>{_text(run["state"])}</td><td class="number">{run["steps"]}</td>{outcomes}<td>{_link(run["log"], "log")}</td></tr>'
            )
            if "says" in run:
                failed.append(f"<h3>{_text(arm['name'])} seed {run['seed']} failed</h3><pre>{_text(run['says'])}</pre>")
    head = ["arm", "run of seed", "state", "steps", "final", "best", "area", "log"]
    return (
        "<h2>The runs</h2><p>Every number above comes from these folders; study.json holds all of them in full. Runs that are not done "
        f"count nowhere.</p>{''.join(failed)}{_table(head, rows)}"
    )


def _link(path: str, name) -> str:
    return f'<a href="{_text(path)}">{_text(name)}</a>'


def _table(head: list[str], rows: list[str], raw: bool = False) -> str:
    cells = "".join(f'<th scope="col">{name if raw else _text(name)}</th>' for name in head)
    return f'<div class="wide"><table class="study"><tr>{cells}</tr>{"".join(rows)}</table></div>'
