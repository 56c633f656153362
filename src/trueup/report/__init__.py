"""One self-contained HTML page about a run or a rollout dump: verdict, curves, distributions, ladder, worst responses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from trueup.report.causes import judge
from trueup.report.gathered import Gathered
from trueup.report.page import Part, page
from trueup.report.reading import gather
from trueup.report.source import Source, find, writable
from trueup.report.verdict import Finding, Verdict, verdict, verdict_of_steps

__all__ = ["Finding", "Gathered", "Verdict", "verdict", "write_report"]


def write_report(
    path: str | Path | Iterable[str | Path],
    out: str | Path | None = None,
    tokenizer: str | Path | None = None,
    columns: str | None = None,
    progress: Callable[[int], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the page and return where it is.

    Args:
        path: a run directory; rollout files, folders or globs, as `trueup explain` takes them; or the JSON that
            `trueup measure --out` wrote.
        out: the HTML file; default `report.html` inside the run directory, `<dump>-report.html` beside a dump, and the
            same name in the current directory where that folder is read-only.
        tokenizer: folder with a tokenizer.json for the text of tokens, and to prove re-tokenisation; default: for the
            text, the run's newest checkpoint, or the measured model where it is a folder.
        columns: what the columns are called, as for `trueup explain`.
        progress: told the tokens of each batch; every file is read twice, for the page and for the causes.
        say: told in a sentence where the page does not go to its usual place.

    Raises FileNotFoundError or ValueError, with what to do, where there is nothing to compare.
    """
    source = find(path, tokenizer)
    parts = [_part(source, name, files, columns, progress, tokenizer) for name, files in source.parts]
    target = Path(out) if out is not None else writable(source.out)
    if out is None and target != source.out:
        say(f"{source.out.parent} is read-only: the report goes to the current directory (--out FILE chooses)")
    _write(target, page(source, parts))
    return target


def _part(source: Source, name: str, files: list[Path], columns: str | None, progress, tokenizer) -> Part:
    gathered = gather(files, columns, progress or (lambda tokens: None))
    if not source.run:
        _require_both(files, gathered)
    cut = _cut(source)
    if gathered.responses or not source.metrics:
        return Part(name, gathered, judge(verdict(gathered, cut), files, columns, progress, tokenizer))
    return Part(name, gathered, verdict_of_steps(source.metrics, source.engine, cut))


def _require_both(files: list[Path], gathered: Gathered) -> None:
    names = ", ".join(str(file) for file in files)
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
