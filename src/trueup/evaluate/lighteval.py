"""lighteval: `details_<task>_<date>.parquet`, one row a problem. Two layouts: structs `doc`, `model_response`, `metric`
(since 0.11), and flat columns `example`, `predictions`, `gold`, `metrics` (before)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet

from trueup.evaluate.lmeval import choose_metric, scores_of
from trueup.evaluate.records import Answer, Evaluation, Item, content_key

FILE = re.compile(r"details_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT.+)\.parquet$")


def is_details(columns: Iterable[str]) -> bool:
    columns = set(columns)
    return {"doc", "model_response", "metric"} <= columns or {"predictions", "metrics", "full_prompt"} <= columns


def read(path: Path, metric: str | None = None) -> Evaluation:
    """One metric; by default the first of `lmeval.METRICS` it has, or else its first."""
    with pyarrow.parquet.ParquetFile(path) as file:
        rows = file.read().to_pylist()
    if not rows:
        raise ValueError(f"{path} has no rows; expected one row a problem")
    structs = "doc" in rows[0]
    name = "metric" if structs else "metrics"
    metric = choose_metric(path, _present(rows[0][name]), metric)
    items = [
        (_item if structs else _flat_item)(row, row[name].get(metric), path, number) for number, row in enumerate(rows)
    ]
    settings, name = {"harness": "lighteval", "metric": metric}, path.stem
    if match := FILE.search(path.name):
        settings["task"], name = match["task"], f"lighteval {path.parent.parent.name or match['task']}"
        settings |= _results(path, match["task"], match["date"], metric)
    return Evaluation(name, items, settings)


def _results(path: Path, task: str, date: str, metric: str) -> dict:
    """OUT/details/MODEL/DATE/details_TASK_DATE.parquet has its summary in OUT/results/MODEL/results_DATE.json."""
    parts = path.absolute().parts
    if "details" not in parts:
        return {}
    place = len(parts) - 1 - parts[::-1].index("details")
    summary = Path(*parts[:place], "results", *parts[place + 1 : -2], f"results_{date}.json")
    if not summary.is_file():
        return {}
    reported = json.loads(summary.read_text(encoding="utf-8")).get("results", {}).get(task, {}).get(metric)
    return {} if reported is None else {"reported": reported}


def _present(metrics: dict) -> dict:
    """A parquet struct has the metrics of all rows; those of this one are not null."""
    return {name: value for name, value in metrics.items() if value is not None}


def _item(row: dict, value, path: Path, number: int) -> Item:
    doc, response = row["doc"], row["model_response"]
    score = _score(value, path, number)
    question = doc.get("original_query") or doc["query"]
    reference = _gold(doc.get("choices") or [], doc.get("gold_index"))
    texts, ids = response.get("text") or [], response.get("output_tokens") or []
    kept = response.get("text_post_processed") or []
    if texts:
        answer = Answer(texts[0], score, kept[0] if kept else None, ids=ids[0] if len(ids) == len(texts) else None)
    else:
        answer = _chosen(doc.get("choices") or [], response.get("logprobs") or [], score)
    return Item(content_key(question, reference), question, reference, [answer], response.get("input_tokens") or None)


def _flat_item(row: dict, value, path: Path, number: int) -> Item:
    score = _score(value, path, number)
    question = row.get("example") or row["full_prompt"]
    predictions = _literal(row["predictions"])
    if row.get("choices"):
        reference = _gold(row["choices"], row.get("gold_index"))
        answer = _chosen(row["choices"], predictions, score)
    else:
        gold = _literal(row.get("gold")) or [""]
        reference = str(gold[0])
        text = predictions[0] if predictions else ""
        answer = Answer(text[0] if isinstance(text, list) else str(text), score)
    return Item(content_key(question, reference.strip()), question, reference.strip(), [answer])


def _score(value, path: Path, number: int) -> float:
    found = scores_of(value)
    if not found:
        raise ValueError(f"{path}: row {number} has no number for the metric, but {value!r}")
    return sum(found) / len(found)


def _gold(choices: list[str], index) -> str:
    places = index if isinstance(index, list) else [index]
    if not choices or not places or places[0] is None:
        return ""
    return choices[places[0]].strip()


def _chosen(choices: list[str], likelihoods: list, score: float) -> Answer:
    """The choice of highest log-likelihood."""
    values = [float(value[0] if isinstance(value, list) else value) for value in likelihoods][: len(choices)]
    if not values or len(values) != len(choices):
        return Answer("", score)
    best = max(range(len(values)), key=values.__getitem__)
    others = [value for place, value in enumerate(values) if place != best]
    text = choices[best].strip()
    return Answer(text, score, text, margins=[values[best] - max(others)] if others else None)


def _literal(value) -> list:
    """Some releases stored lists as their Python text."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return [value]
    return value if isinstance(value, list) else [] if value is None else [value]
