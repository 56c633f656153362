"""What a study says while it runs: runs done, steps a second, time left; a bar only where somebody watches."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trueup.study.runs import Run


class StudyProgress:
    def __init__(self, runs: list[Run], console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False)
        self._runs = runs
        self._done = {run: run.config.steps if run.done() else min(run.steps(), run.config.steps) for run in runs}
        self._complete = sum(run.done() for run in runs)
        self._before = sum(self._done.values())
        self._total = sum(run.config.steps for run in runs)
        self._bars: dict[Run, int] = {}
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._all = self._progress.add_task("study", total=self._total, completed=self._before, note="")

    def __enter__(self) -> StudyProgress:
        self._begin = time.monotonic()
        self.say(f"{len(self._runs)} runs of {self._total:,} steps in all; {self._complete} are done")
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def begin(self, run: Run) -> None:
        steps = run.config.steps
        self._bars[run] = self._progress.add_task(f"  {run.name}", total=steps, completed=self._done[run], note="")

    def advance(self, run: Run) -> None:
        # A resumed run first forgets the steps after its checkpoint; the count never goes back for that.
        self._done[run] = max(self._done[run], min(run.steps(), run.config.steps))
        self._progress.update(self._bars[run], completed=self._done[run])
        self._progress.update(self._all, completed=sum(self._done.values()), note=self._pace())

    def end(self, run: Run, record: dict) -> None:
        self._progress.remove_task(self._bars.pop(run))
        self._complete += record["state"] == "done"
        said = {"done": "done", "stopped": "stopped, to be continued", "failed": "FAILED"}[record["state"]]
        accuracy = next((row["eval/accuracy"] for row in reversed(run.rows()) if "eval/accuracy" in row), None)
        held_out = f", held-out {accuracy:.1%}" if accuracy is not None else ""
        why = f"; see {run.log}:\n{record['says']}" if record["state"] == "failed" else ""
        self.say(f"{run.name}: {said}{held_out}, {record['seconds']:.0f} s  ({self._pace()}){why}")

    def _pace(self) -> str:
        seconds, done = time.monotonic() - self._begin, sum(self._done.values())
        made = f"{self._complete} of {len(self._runs)} runs done"
        if done == self._before:
            return made
        rate = (done - self._before) / seconds
        return f"{made}, {rate:.2g} steps/s, {_span((self._total - done) / rate)} left"


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60:02d} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else "under a minute"
    )
