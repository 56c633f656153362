"""One progress bar over all engines, on standard error; a line an engine where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from trueup.evaluate.run import Progress


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, speed="")

        def show(progress: Progress) -> None:
            speed = progress.tokens_per_second
            bar.update(
                task,
                description=progress.engine,
                completed=progress.done,
                total=progress.total,
                speed="" if speed is None else f"{speed:,.0f} tok/s",
            )

        yield show


class _Lines:
    """Says when an engine begins, not every chunk: logs are read afterwards."""

    def __init__(self):
        self._engine = ""

    def __call__(self, progress: Progress) -> None:
        if progress.engine != self._engine:
            self._engine = progress.engine
            print(f"{progress.engine}: {progress.done} of {progress.total} answers so far", file=sys.stderr, flush=True)
