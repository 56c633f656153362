"""lm-evaluation-harness: `samples_<task>_<date>.jsonl`, one row a problem and filter, and `results_<date>.json` beside it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from trueup.evaluate.records import Answer, Evaluation, Item, content_key

# Where a problem's text is found in the row of its data set, most specific first.
QUESTIONS = ("question", "problem", "query", "prompt", "input", "ctx", "goal", "sentence", "text")
METRICS = (
    "exact_match",
    "extractive_match",
    "acc",
    "acc_norm",
    "pass@1",
    "prompt_level_strict_acc",
    "math_verify",
    "acc_bytes",
    "f1",
    "em",
)
"""Which metric counts where several were logged and none is asked for."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.:-]+)\.jsonl$")


def is_sample(row: dict) -> bool:
    return {"doc", "resps", "filtered_resps", "arguments"} <= row.keys()


def read(path: Path, metric: str | None = None, filter: str | None = None) -> Evaluation:
    """One metric of one filter; by default the first filter of the file and the first of `METRICS` that it has."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    filters = list(dict.fromkeys(row.get("filter", "none") for row in rows))
    # Another file of the comparison may have no such filter (multiple choice has none): only then is this an error.
    chosen = filters[0] if filter is None else filter
    if chosen not in filters:
        raise ValueError(f"{path} has no filter {filter!r}; it has {', '.join(filters)}")
    rows = [row for row in rows if row.get("filter", "none") == chosen]
    metric = choose_metric(path, _metrics(rows[0]), metric)
    items = [_item(row, metric, path) for row in rows]
    _tell_apart(items, rows)
    settings = {"harness": "lm-eval", "metric": metric, "filter": chosen, "filters": filters} | _sampling(rows[0])
    settings["prompt_texts_sha256"] = _prompts(rows)
    name = path.stem
    if match := FILE.search(path.name):
        settings["task"], name = match["task"], f"{path.parent.name}:{match['task']}"
        beside = path.with_name(f"results_{match['date']}.json")
        if beside.is_file():
            settings |= _results(beside, match["task"], metric, chosen)
            name = f"lm-eval {settings['engine']}" if "engine" in settings else name
    return Evaluation(name, items, settings)


def choose_metric(path: Path, found: dict[str, object], asked: str | None) -> str:
    """The name of a metric whose value is one number; asked: the first of A,B,... that is there, since harnesses have names
    of their own. Raises ValueError naming those there are."""
    numbers = [name for name, value in found.items() if score_of(value) is not None]
    if asked is not None:
        if known := [name for name in asked.split(",") if name in numbers]:
            return known[0]
        raise ValueError(
            f"{path} has no metric {asked!r} with one number a problem; it has {', '.join(numbers) or 'none'}"
        )
    if not numbers:
        raise ValueError(f"{path} has no metric with one number a problem; found {', '.join(found) or 'none'}")
    return next((name for name in METRICS if name in numbers), numbers[0])


def score_of(value) -> float | None:
    """A number, or a list with one number a repeat: their mean is the score, see `scores_of`."""
    values = scores_of(value)
    return sum(values) / len(values) if values else None


def scores_of(value) -> list[float]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, (int, float)) for one in values):
        return []
    return [float(one) for one in values]


def _metrics(row: dict) -> dict:
    known = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
    names = row.get("metrics") or [name for name in row if name not in known and not name.endswith("_hash")]
    repeats = len(row["resps"][0]) if isinstance(row["resps"][0], list) else 1
    # A list is one number a repeat, or else what a corpus metric adds up later: (gold, prediction) for f1 and mcc.
    judged = lambda value: value if not isinstance(value, list) or 1 < len(value) == repeats else None  # noqa: E731
    return {name: judged(row.get(name)) for name in names}


def _item(row: dict, metric: str, path: Path) -> Item:
    arguments = _arguments(row["arguments"])
    score = scores_of(row.get(metric))
    if not score:
        raise ValueError(f"{path}: document {row.get('doc_id')} has {metric}={row.get(metric)!r}; expected a number")
    if len(arguments[0]) > 1 and isinstance(arguments[0][1], str):
        reference, answers = _choice(row, arguments, metric, score[0])
    else:
        reference, answers = _target(row), _generated(row, score)
    question = _question(row["doc"], arguments[0][0])
    return Item(content_key(question, reference), question, reference, answers)


def _arguments(arguments) -> list[list]:
    """{"gen_args_0": {"arg_0": context, "arg_1": continuation or settings}, ...}; lists of lists before 0.4.4."""
    requests = list(arguments.values()) if isinstance(arguments, dict) else arguments
    return [list(request.values()) if isinstance(request, dict) else list(request) for request in requests]


def _question(doc, context) -> str:
    for name in QUESTIONS if isinstance(doc, dict) else ():
        if isinstance(doc.get(name), str) and doc[name].strip():
            return doc[name]
    return context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)


def _target(row: dict) -> str:
    target = row["target"]
    return target if isinstance(target, str) else json.dumps(target, ensure_ascii=False)


def _generated(row: dict, scores: list[float]) -> list[Answer]:
    responses = row["resps"][0] if isinstance(row["resps"][0], list) else row["resps"]
    kept = row["filtered_resps"][0]
    kept = kept if isinstance(kept, list) else [kept]
    # With repeats, one number may judge all of them: then there is one answer, whose text is the first response.
    return [
        Answer(str(responses[min(place, len(responses) - 1)]), score, _extracted(kept[min(place, len(kept) - 1)]))
        for place, score in enumerate(scores)
    ]


def _extracted(text) -> str | None:
    return text if isinstance(text, str) and text != "[invalid]" else None


def _choice(row: dict, arguments: list[list], metric: str, score: float) -> tuple[str, list[Answer]]:
    """(text of the right choice, the answer): the choice of highest log-likelihood, per character for acc_norm."""
    choices = [request[1] for request in arguments]
    if len(choices) > 1 and len(set(choices)) == 1:  # the contexts differ instead (winogrande)
        choices = [str(request[0]) for request in arguments]
    half = len(choices) // 2
    if half > 1 and choices[:half] == choices[half:]:  # acc_mutual_info asks every choice again without the context
        choices = choices[:half]
    likelihood = [float(response[0]) for response in row["filtered_resps"][: len(choices)]]
    if metric in ("acc_norm", "acc_bytes"):
        length = (lambda text: len(text.encode())) if metric == "acc_bytes" else len
        likelihood = [value / max(length(text), 1) for value, text in zip(likelihood, choices)]
    best = max(range(len(choices)), key=likelihood.__getitem__)
    others = [value for place, value in enumerate(likelihood) if place != best]
    margins = [likelihood[best] - max(others)] if others else None
    target = _target(row)
    if len(choices) == 1:
        target = choices[0]
    elif target.isdigit() and int(target) < len(choices):
        target = choices[int(target)]
    return target.strip(), [Answer(choices[best].strip(), score, choices[best].strip(), margins=margins)]


def _tell_apart(items: list[Item], rows: list[dict]) -> None:
    """Where different documents share question and reference (SQuAD asks one question of two passages), the whole document
    tells them apart."""
    documents: dict[str, set[str]] = {}
    texts = [json.dumps(row["doc"], sort_keys=True, ensure_ascii=False) for row in rows]
    for item, text in zip(items, texts):
        documents.setdefault(item.key, set()).add(text)
    for item, text in zip(items, texts):
        if len(documents[item.key]) > 1:
            item.key = content_key(text, item.reference)


def _sampling(row: dict) -> dict:
    """Settings that the requests carry."""
    request = _arguments(row["arguments"])[0]
    if len(request) < 2 or not isinstance(request[1], dict):
        return {"kind": "choice"}
    asked, settings = request[1], {"kind": "generate"}
    for ours, theirs in (("top_p", "top_p"), ("top_k", "top_k"), ("min_p", "min_p"), ("max_tokens", "max_gen_toks")):
        if theirs in asked:
            settings[ours] = asked[theirs]
    settings["temperature"] = asked.get("temperature", 1.0) if asked.get("do_sample") else 0.0
    settings["stop"] = asked.get("until", [])
    return settings


def _prompts(rows: list[dict]) -> str:
    """Of the texts that the model was given, in any order of problems."""
    texts = sorted(json.dumps(_arguments(row["arguments"])[0][0], ensure_ascii=False) for row in rows)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _results(path: Path, task: str, metric: str, filter: str) -> dict:
    found = json.loads(path.read_text(encoding="utf-8"))
    settings = {
        "model": found.get("model_name"),
        "chat_template_sha256": found.get("chat_template_sha"),
        "system_instruction": found.get("system_instruction"),
        "reported": found.get("results", {}).get(task, {}).get(f"{metric},{filter}"),
    }
    if source := found.get("model_source"):
        arguments = (found.get("config") or {}).get("model_args") or {}
        dtype = arguments.get("dtype") if isinstance(arguments, dict) else None
        settings["precision"] = DTYPES.get(dtype, dtype)
        settings["engine"] = f"{source}:{settings['precision']}" if dtype else source
    return {name: value for name, value in settings.items() if value is not None}
