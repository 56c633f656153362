"""One self-contained HTML page about a run or a rollout dump: verdict, curves, distributions, worst responses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from trueup.report.gathered import Gathered
from trueup.report.page import page
from trueup.report.source import Source, find
from trueup.report.verdict import Finding, Verdict, verdict, verdict_of_steps

__all__ = ["Finding", "Gathered", "Verdict", "verdict", "write_report"]


def write_report(
    path: str | Path | Iterable[str | Path],
    out: str | Path | None = None,
    tokenizer: str | Path | None = None,
    judge: Callable[[Gathered, float | None], Verdict] = verdict,
) -> Path:
    """Write the page and return where it is.

    Args:
        path: a run directory, or one or several rollout parquet files.
        out: the HTML file; default `report.html` inside the run directory, `<dump>-report.html` beside the first dump.
        tokenizer: folder with a tokenizer.json for the text of tokens; default: the run's newest checkpoint.
        judge: (statistics, share of tokens that the correction cut or None) -> the verdict on top of the page.

    Raises FileNotFoundError or ValueError, with what to do, where there is nothing to compare.
    """
    source = find(path, tokenizer)
    gathered = Gathered().read(source.files)
    if not source.run:
        _require_both(source, gathered)
    target = Path(out) if out is not None else source.out
    cut = _cut(source)
    if gathered.responses or not source.metrics:
        judged = judge(gathered, cut)
    else:
        judged = verdict_of_steps(source.metrics, source.engine, cut)
    _write(target, page(source, gathered, judged))
    return target


def _require_both(source: Source, gathered: Gathered) -> None:
    names = ", ".join(str(file) for file in source.files)
    if not gathered.responses:
        raise ValueError(f"{names}: no responses, nothing to report on")
    if gathered.unscored_responses == gathered.responses:
        raise ValueError(
            f"{names}: no column learner_logprobs, nothing to compare the sampler with. Score the same tokens with the "
            "learner at the same temperature (`trueup.learner.model.Policy.score`, or your trainer's own log-probs) and "
            "write them as learner_logprobs, list<float> of the length of response_ids; `trueup train` writes both"
        )


def _cut(source: Source) -> float | None:
    """Share of the tokens that the run's correction truncated or dropped, mean over the steps."""
    names = ("correction/truncated_fraction", "correction/masked_fraction")
    cuts = [sum(row[name] for name in names) for row in source.metrics if all(_number(row.get(name)) for name in names)]
    return sum(cuts) / len(cuts) if cuts else None


def _number(value) -> bool:
    return isinstance(value, (int, float))


def _write(path: Path, text: str) -> None:
    """Under a temporary name first: a kill leaves the old page or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
