"""Studies: a grid of runs, arms times seeds, and one page about what they show."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from trueup.config import ConfigError
from trueup.study.design import Study, load_study
from trueup.study.progress import StudyProgress
from trueup.study.results import gather
from trueup.study.runner import available_cores, run_all
from trueup.study.runs import all_runs, refuse_changes
from trueup.study.write import write_results

__all__ = ["Study", "load_study", "study"]


def study(
    path: str | Path,
    out: str | Path | None = None,
    only: str | None = None,
    cores: int | None = None,
    page_only: bool = False,
    console: Console | None = None,
) -> dict:
    """Run what a study's folder lacks, write its results and return them.

    path: the study's YAML. out: its folder, default `runs/studies/NAME`. only: this arm alone is run; the page shows all
    there is. cores: side by side at most; default: the study's own, or all. page_only: run nothing.

    Raises ConfigError on a study that cannot run, or a folder whose runs were begun with other settings.
    """
    loaded = load_study(path)
    out = Path(out) if out is not None else Path("runs/studies") / loaded.name
    if only and only not in [arm.name for arm in loaded.arms]:
        raise ConfigError(f"--only {only}: no such arm; arms: {', '.join(arm.name for arm in loaded.arms)}")
    everything = all_runs(loaded, out)
    refuse_changes(everything)
    if page_only and not any(run.started for run in everything):
        raise ConfigError(f"{out} holds no run of {path} yet; leave --page-only out to make them")
    write = lambda: write_results(gather(loaded, everything), out)  # noqa: E731
    stopped = None
    if not page_only:
        runs = all_runs(loaded, out, only)
        using = available_cores(cores or loaded.file.cores, loaded.file.threads)
        stopped = run_all(runs, using, loaded.file.threads, StudyProgress(runs, console), after=write)
    return write() | {"stopped_by": stopped}
