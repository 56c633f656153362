"""What an evaluation leaves behind: problems, answers and the settings that made them; one parquet row an answer."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

SCHEMA_VERSION = 1
METADATA_KEY = b"trueup.eval"

# An absent value is null in the file: a file with no log-probs says so, rather than that every response was empty.
SCHEMA = pa.schema(
    [
        ("item", pa.int32()),
        ("sample", pa.int32()),
        ("key", pa.string()),
        ("question", pa.string()),
        ("reference", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("correct", pa.float64()),
        ("extracted", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("logprobs", pa.list_(pa.float32())),
        ("margins", pa.list_(pa.float32())),
    ]
)
ANSWER_COLUMNS = ("text", "correct", "extracted", "ids", "finish_reason", "logprobs", "margins")


@dataclass
class Answer:
    """One response and what the verifier made of it."""

    text: str
    correct: float
    """Score of the response, usually 0.0 or 1.0."""
    extracted: str | None = None
    """The answer that the verifier read out of the text; None: it found none, or does not say."""
    ids: list[int] | None = None
    """Response token ids."""
    finish_reason: str | None = None
    """`stop` or `length`."""
    logprobs: list[float] | None = None
    """Log-probability of each response token, as sampled from."""
    margins: list[float] | None = None
    """Largest minus second largest log-probability at each position; greedy only."""


@dataclass
class Item:
    """One problem with its K answers, in sample order."""

    key: str
    """`content_key(question, reference)`: equal wherever the same problem was asked."""
    question: str
    reference: str
    answers: list[Answer]
    prompt_ids: list[int] | None = None

    @property
    def score(self) -> float:
        """Mean score of the answers."""
        return sum(answer.correct for answer in self.answers) / len(self.answers)


@dataclass
class Evaluation:
    """One engine (or one file of results) on one task."""

    name: str
    items: list[Item]
    settings: dict = field(default_factory=dict)
    """What was asked of the engine, ready for JSON: model, task, engine, temperature, top_p, ..., tokens_per_second."""

    @property
    def samples(self) -> int:
        """Answers a problem, K. Raises ValueError where problems have different numbers of them."""
        counts = {len(item.answers) for item in self.items}
        if len(counts) > 1:
            few = min(self.items, key=lambda item: len(item.answers))
            raise ValueError(
                f"{self.name}: problems have {min(counts)} to {max(counts)} answers (key {few.key} has the fewest); "
                "statistics need the same number for every problem: finish the evaluation, or leave those problems out"
            )
        return counts.pop() if counts else 0

    def save(self, path: str | Path) -> None:
        """To a temporary name first: a kill leaves the old file or the new one, never half."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        pyarrow.parquet.write_table(self._table(), temporary, compression="zstd")
        os.replace(temporary, path)

    def _table(self) -> pa.Table:
        try:
            head = json.dumps({"schema": SCHEMA_VERSION, "name": self.name, "settings": self.settings})
        except TypeError as error:
            raise ValueError(f"the settings of {self.name} cannot be written as JSON: {error}") from None
        columns: dict[str, list] = {name: [] for name in SCHEMA.names}
        for number, item in enumerate(self.items):
            if not item.answers:
                raise ValueError(
                    f"{self.name}: problem {number} (key {item.key}) has no answers; nothing to write of it"
                )
            for sample, answer in enumerate(item.answers):
                columns["item"].append(number)
                columns["sample"].append(sample)
                columns["key"].append(item.key)
                columns["question"].append(item.question)
                columns["reference"].append(item.reference)
                columns["prompt_ids"].append(item.prompt_ids if sample == 0 else None)
                for name in ANSWER_COLUMNS:
                    columns[name].append(getattr(answer, name))
        return pa.table(columns, schema=SCHEMA.with_metadata({METADATA_KEY: head}))

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Raises ValueError for a file of another kind or schema version, FileNotFoundError for none."""
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        if METADATA_KEY not in metadata:
            raise ValueError(f"{path} is not an evaluation of trueup: its metadata has no {METADATA_KEY.decode()}")
        head = json.loads(metadata[METADATA_KEY])
        if head.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"{path} is an evaluation of schema {head.get('schema')}; this trueup reads schema {SCHEMA_VERSION}: "
                "use the release that wrote it"
            )
        # Not read_table: a path like engine=vllm/x.parquet would gain a column from its folder's name. Nor an open Python
        # file: Arrow's threads may still hold it when the interpreter ends, which aborts the process.
        with pyarrow.parquet.ParquetFile(path) as file:
            table = file.read()
        return cls(head["name"], list(_items(table)), head["settings"])


def _items(table: pa.Table) -> Iterator[Item]:
    """Rows of a problem lie together, sample 0 first."""
    item = None
    for row in table.to_pylist():
        if row["sample"] == 0:
            if item is not None:
                yield item
            item = Item(row["key"], row["question"], row["reference"], [], row["prompt_ids"])
        item.answers.append(Answer(**{name: row[name] for name in ANSWER_COLUMNS}))
    if item is not None:
        yield item


def content_key(question: str, reference: str) -> str:
    """16 hex digits that depend on what is asked and on the right answer alone, so that results of several engines and
    harnesses can be matched. How space is laid out does not count; of a worked solution (GSM8K's) what
    follows the last `####` counts."""
    content = json.dumps([canonical(question), canonical_reference(reference)], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def canonical(text: str) -> str:
    """The same text however it was typed: Unicode composed (NFC), runs of white space as one space, none around."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def canonical_reference(reference: str) -> str:
    """The final answer of a reference; thousands separators do not count in a number."""
    answer = canonical(reference.rpartition("####")[2])
    bare = answer.replace(",", "")
    return bare if bare.removeprefix("-").replace(".", "", 1).isdigit() else answer
