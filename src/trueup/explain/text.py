"""The verdict in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueup.explain.dump import expand
from trueup.explain.finding import FLOORS


def print_verdict(verdict: dict, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    stats, causes = verdict["stats"], verdict["causes"]
    named = [cause["cause"] for cause in causes if cause["cause"] not in FLOORS]
    ground = next(cause["cause"] for cause in causes if cause["cause"] in FLOORS)
    head = f"healthy: nothing but {ground}" if verdict["healthy"] else "not healthy: " + ", ".join(named)
    console.print(f"{head}  ({stats['rows']:,} responses, {stats['tokens']:,} tokens)", markup=False, soft_wrap=True)
    table = Table(show_lines=True)
    table.add_column("cause", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("confidence", justify="right", no_wrap=True)
    table.add_column("where, why, and what to do")
    for cause in causes:
        words = f"{cause['where']}\n{cause['evidence']}\n{cause['remedy']}"
        table.add_row(cause["cause"], f"{cause['share']:.1%}", f"{cause['confidence']:.2%}", Text(words))
    console.print(table)
    numbers = Table(show_header=False)
    numbers.add_column()
    numbers.add_column(justify="right")
    for label, value in (
        ("KL(sampler, learner), k3", _interval(stats["kl_k3"])),
        ("the same, k1", _interval(stats["kl_k1"])),
        ("E[rho], must be 1", _interval(stats["rho"])),
        ("mean |log rho|", _interval(stats["log_rho_abs"])),
        ("mean, largest |pi - mu|", f"{_number(stats['prob_diff']['mean'])}, {_number(stats['prob_diff_max'])}"),
        ("ESS a token, a response", f"{_number(stats['ess_token'])}, {_number(stats['ess_sequence'])}"),
        ("missing log-probs", f"{stats['missing_fraction']:.2%}"),
    ):
        numbers.add_row(Text(label), value)
    console.print(numbers)


def _interval(value: dict) -> str:
    return f"{_number(value['mean'])} ({_number(value['low'])} to {_number(value['high'])})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@contextmanager
def progress_bar(paths: Sequence[str] = (), passes: int = 1) -> Iterator[Callable[[int], None] | None]:
    """Tokens read, on standard error of a terminal, once the dump turns out to take more than a second.

    paths: what is read, `passes` times; how many tokens that are is looked up in parquet files, and not known of others.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    total = passes * tokens_in(paths) or None
    shown = (BarColumn(), TimeRemainingColumn()) if total else (SpinnerColumn(), TimeElapsedColumn())
    columns = (*shown, TextColumn("{task.completed:,.0f} tokens"))
    progress, started = Progress(*columns, console=Console(stderr=True), transient=True), time.monotonic()
    task = progress.add_task("reading", total=total)

    def advance(tokens: int) -> None:
        progress.advance(task, tokens)
        if not progress.live.is_started and time.monotonic() - started > 1:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()


def tokens_in(paths: Sequence[str]) -> int:
    """Tokens in the parquet files among these files, folders and globs, by their footers; 0 where that is not known."""
    import pyarrow.parquet as pq

    try:
        footers = [pq.read_metadata(file) for file in expand(list(paths)) if file.suffix == ".parquet"]
    except (OSError, ValueError):  # whoever reads them says what is wrong
        return 0
    return sum(_longest_list(footer, group) for footer in footers for group in range(footer.num_row_groups))


def _longest_list(footer, group: int) -> int:
    columns = (footer.row_group(group).column(index) for index in range(footer.num_columns))
    lists = [column for column in columns if "." in column.path_in_schema and "prompt" not in column.path_in_schema]
    return max((column.num_values for column in lists), default=0)
