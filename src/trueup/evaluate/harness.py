"""Results made elsewhere -> `Evaluation`. What a file is, is decided by its content, not by its name.

| results | defined in |
|---|---|
| our own parquet | `records.py` |
| lm-evaluation-harness `--log_samples` JSONL | `lm_eval/evaluator.py` (the sample), `lm_eval/loggers/evaluation_tracker.py` (the file); seen in 0.4.13 |
| lighteval details parquet | `lighteval/logging/info_loggers.py`, `DetailsLogger.Detail`: doc, model_response, metric (0.13); example, predictions, metrics before |
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet

from trueup.evaluate import lighteval, lmeval
from trueup.evaluate.records import METADATA_KEY, Evaluation


def read_results(path: str | Path, *, metric: str | None = None, filter: str | None = None) -> list[Evaluation]:
    """The evaluations in a file, or in a folder (searched through); NAME=PATH gives a single one its name.

    Raises FileNotFoundError, or ValueError for what is no evaluation or names no usable metric.
    """
    name, path = _named(path)
    if path.is_dir():
        files = _results_in(path)
    elif path.is_file():
        files = [path]
    else:
        raise FileNotFoundError(f"{path} does not exist; expected results of an evaluation (file or folder)")
    found = [_read(file, metric, filter) for file in files]
    if name and len(found) > 1:
        raise ValueError(f"{name}={path} names one evaluation, but there are {len(found)}: give the file")
    for file, evaluation in zip(files, found):
        evaluation.name = name or evaluation.name
        evaluation.settings["source"] = str(file)
    return found


def _named(path: str | Path) -> tuple[str | None, Path]:
    name, sign, rest = str(path).partition("=")
    if sign and name and "/" not in name and not Path(path).expanduser().exists():
        return name, Path(rest).expanduser()
    return None, Path(path).expanduser()


def _results_in(folder: Path) -> list[Path]:
    """Ours, all of them (one an engine); of a harness one, since a folder of theirs holds several tasks or dates."""
    ours = [file for file in sorted(folder.glob("*.parquet")) if _kind(file) == "ours"]
    if ours:
        return ours
    theirs = [file for file in sorted(folder.rglob("*.parquet")) if _kind(file) == "lighteval"]
    theirs += sorted(folder.rglob("samples_*.jsonl"))
    if len(theirs) == 1:
        return theirs
    if not theirs:
        raise FileNotFoundError(
            f"{folder} holds no results: expected parquet of `trueup eval`, samples_*.jsonl of lm-evaluation-harness "
            "(--log_samples) or details_*.parquet of lighteval (--save-details)"
        )
    listed = "\n  ".join(str(file) for file in theirs[:10])
    raise ValueError(f"{folder} holds {len(theirs)} files of results; name the one to compare:\n  {listed}")


def _read(path: Path, metric: str | None, filter: str | None) -> Evaluation:
    kind = _kind(path)
    if kind == "ours":
        return Evaluation.load(path)
    if kind == "lighteval":
        return lighteval.read(path, metric)
    if kind == "lm-eval":
        return lmeval.read(path, metric, filter)
    raise ValueError(
        f"{path} is no evaluation that trueup knows ({_what(path)}); expected parquet of `trueup eval`, a samples_*.jsonl of "
        "lm-evaluation-harness (--log_samples) or a details_*.parquet of lighteval (--save-details)"
    )


def _kind(path: Path) -> str | None:
    with open(path, "rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    if is_parquet:
        schema = pyarrow.parquet.read_schema(path)
        if METADATA_KEY in (schema.metadata or {}):
            return "ours"
        return "lighteval" if lighteval.is_details(schema.names) else None
    row = _first_row(path)
    return "lm-eval" if row is not None and lmeval.is_sample(row) else None


def _first_row(path: Path) -> dict | None:
    try:
        with open(path, encoding="utf-8") as file:
            row = json.loads(next(line for line in file if line.strip()))
    except (StopIteration, ValueError):  # empty, no JSON, or no text at all
        return None
    return row if isinstance(row, dict) else None


def _what(path: Path) -> str:
    row = None if path.suffix == ".parquet" else _first_row(path)
    if row is not None:
        return "its first row has " + ", ".join(list(row)[:8])
    try:
        return "its columns are " + ", ".join(pyarrow.parquet.read_schema(path).names[:8])
    except (pyarrow.ArrowInvalid, OSError):
        return "neither parquet nor JSON lines"
