"""A comparison in a terminal: one column an engine, one column a pair, since names are long and numbers are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueup.evaluate.verdict import points

Rows = dict[str, Callable[[dict], str]]
"""Label -> the cell of an engine or a pair."""


def print_comparison(result: dict, console: Console | None = None) -> None:
    """result: of `compare`."""
    console = console or Console(highlight=False)
    answers = "one answer each" if result["samples"] == 1 else f"{result['samples']} answers each"
    console.print(f"{result['items']:,} problems, {answers}; differences in points, second minus first", soft_wrap=True)
    engines, pairs = result["engines"], result["pairs"]
    _print_columns(console, engines, lambda engine: engine["name"], _engine_rows(engines))
    if pairs:
        _print_columns(console, pairs, lambda pair: f"{pair['a']}\n{pair['b']}", _pair_rows(pairs[0]))
    for pair in pairs:
        console.print(f"- {pair['verdict']}", markup=False, soft_wrap=True)
    for note in result["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _print_columns(console: Console, things: Sequence[dict], head: Callable[[dict], str], rows: Rows) -> None:
    cells = [line for thing in things for line in (*head(thing).split("\n"), *(cell(thing) for cell in rows.values()))]
    room = console.width - max(map(len, rows)) - 4
    columns = max(1, room // (max(map(len, cells)) + 3))
    for start in range(0, len(things), columns):
        part = things[start : start + columns]
        table = Table()
        table.add_column("", no_wrap=True)
        for thing in part:
            table.add_column(Text(head(thing)), justify="right", overflow="fold")
        for label, cell in rows.items():
            table.add_row(label, *(cell(thing) for thing in part))
        console.print(table)


def _engine_rows(engines: Sequence[dict]) -> Rows:
    rows: Rows = {
        "accuracy": lambda engine: f"{engine['accuracy']:.1%}",
        "95% interval": lambda engine: f"{100 * engine['low']:.1f} to {engine['high']:.1%}",
    }
    for k in list(engines[0]["pass_at_k"])[1:]:  # pass@1 is the accuracy
        rows[f"pass@{k}"] = lambda engine, k=k: f"{engine['pass_at_k'][k]['value']:.1%}"
    rows["mean length"] = lambda engine: f"{engine['mean_length']:.1f} {engine['length_unit']}"
    if any(engine["truncated"] is not None for engine in engines):
        rows["truncated"] = lambda engine: "-" if engine["truncated"] is None else f"{engine['truncated']:.1%}"
    if any(engine["tokens_per_second"] for engine in engines):
        rows["tokens/s"] = lambda engine: f"{engine['tokens_per_second']:,.0f}" if engine["tokens_per_second"] else "-"
    return rows


def _pair_rows(pair: dict) -> Rows:
    if "only_a" in pair:
        counts = {
            "right in both": "both_right",
            "only in the first": "only_a",
            "only in the second": "only_b",
            "in neither": "both_wrong",
        }
    else:
        counts = {"better in the first": "better_a", "better in the second": "better_b", "equal": "equal"}
    rows: Rows = {label: lambda pair, key=key: f"{pair[key]:,}" for label, key in counts.items()}
    return rows | {
        "difference": lambda pair: points(pair["difference"], True),
        "95% interval": lambda pair: f"{points(pair['low'], True)} to {points(pair['high'], True)}",
        "p, exact" if pair["test"].endswith("exact") else "p": lambda pair: f"{pair['p']:.2g}",
        "p, corrected": lambda pair: "null" if pair["null"] else f"{pair['p_holm']:.2g}",
        "unseen under": lambda pair: _or_dash(pair["minimum_detectable"], points),
        "the same within": lambda pair: points(pair["equivalent_within"]),
        "problems needed": lambda pair: _or_dash(pair["items_needed"], "{:,}".format),
        "identical answers": lambda pair: f"{pair['identical']:.1%}",
    }


def _or_dash(value, text: Callable[..., str]) -> str:
    return "-" if value is None else text(value)
