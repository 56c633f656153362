"""What an evaluation asks: settled once, written beside the results, and the same for every engine.

OUT/plan.json       the settings
OUT/asked.parquet   question, reference and prompt ids of every problem
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from trueup.evaluate.records import content_key
from trueup.samplers.base import Sampling
from trueup.tasks import load_task
from trueup.tasks.base import Problem, Task
from trueup.tasks.prompts import encode_prompt

PLAN, ASKED = "plan.json", "asked.parquet"


@dataclass(frozen=True)
class Plan:
    """The settings that every engine is given, whatever its checkpoint's generation_config says."""

    model: str
    task: str
    limit: int | None
    samples: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop: tuple[str, ...]
    """Texts that end a response, besides the stop ids. They are looked for in the decoded text, in one place for all engines."""
    seed: int
    batch: int
    """Problems that an engine is handed together, and that are written together."""
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    kind: str
    """`generate`, or `choice` where given answers are scored."""
    prompts_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str | None
    model_sha256: str | None
    """Of a local folder's configuration and the ends of its weight files: a model that was trained on is another one."""
    generation_config: dict
    """What the checkpoint would like to be sampled with; nobody reads it, the checklist reports it."""

    def sampling(self, seed: int) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            n=self.samples,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.temperature == 0 else seed,
        )

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{PLAN}.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / PLAN)

    @classmethod
    def load(cls, folder: Path) -> Plan:
        known = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return cls(**known | {"stop": tuple(known["stop"]), "stop_token_ids": tuple(known["stop_token_ids"])})

    def check_same(self, folder: Path) -> None:
        """Raise ValueError, naming what differs, if `folder` holds an evaluation of another plan."""
        before = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        now = json.loads(json.dumps(asdict(self)))
        # A field that an older trueup did not write is a difference too.
        differ = [f"{name}={before.get(name)!r}, now {now[name]!r}" for name in now if before.get(name) != now[name]]
        if differ:
            raise ValueError(
                f"{folder} holds an evaluation with {'; '.join(differ)}. Its results cannot be continued with these: "
                "give another --out, or the settings of before"
            )


@dataclass(frozen=True)
class Asked:
    """The problems as they are asked."""

    questions: list[str]
    references: list[str]
    prompts: list[list[int]]
    """Ids; for a choice task the context of the first choice."""

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def keys(self) -> list[str]:
        return [content_key(question, reference) for question, reference in zip(self.questions, self.references)]

    @classmethod
    def of(cls, task: Task, problems: Sequence[Problem], tokenizer) -> Asked:
        encode = getattr(task, "encode", None)
        prompts = [
            encode(problem, tokenizer)[0][0] if encode else encode_prompt(problem, tokenizer) for problem in problems
        ]
        return cls([question_of(problem) for problem in problems], [problem.answer for problem in problems], prompts)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.table(
            {
                "question": self.questions,
                "reference": self.references,
                "prompt_ids": pa.array(self.prompts, pa.list_(pa.int32())),
            }
        )
        pyarrow.parquet.write_table(table, folder / f"{ASKED}.tmp", compression="zstd")
        os.replace(folder / f"{ASKED}.tmp", folder / ASKED)

    @classmethod
    def load(cls, folder: Path) -> Asked:
        with pyarrow.parquet.ParquetFile(folder / ASKED) as file:
            columns = file.read().to_pydict()
        return cls(columns["question"], columns["reference"], columns["prompt_ids"])


def question_of(problem: Problem) -> str:
    """The question as the data has it, where the task keeps it; else the prompt."""
    if question := problem.extra.get("question"):
        return question
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n\n".join(message["content"] for message in problem.prompt)


def problems_of(spec: str, seed: int, limit: int | None) -> tuple[Task, list[Problem]]:
    """The task and the problems that are asked: the held-out ones, or every row where the spec names one file. What training
    would hold out of a file is no matter to an evaluation."""
    task = load_task(spec, seed=seed, heldout=limit)
    name, _, path = spec.partition(":")
    whole = None
    if path and Path(path).expanduser().is_file():
        if name == "gsm8k":
            from trueup.tasks.gsm8k import gsm8k_problems
            from trueup.tasks.jsonl import read_rows

            whole = gsm8k_problems(read_rows(Path(path).expanduser()))
        elif name == "jsonl":
            from trueup.tasks.jsonl import read_problems

            whole = read_problems(Path(path).expanduser())
    problems = list(task.heldout) if whole is None else whole
    return task, problems[:limit]


def sha256_of(rows: Sequence[Sequence[int]]) -> str:
    """Of ids, row by row: equal only for the same ids in the same rows."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([int(token) for token in row]).encode())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer) -> str:
    """Of the vocabulary: which id is which piece, added tokens included."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def template_sha256(tokenizer) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(template).encode()).hexdigest() if template else None


def model_sha256(folder: str) -> str | None:
    """None for a model that is not a local folder: a hub name says which it is."""
    path, digest = Path(folder), hashlib.sha256()
    if not path.is_dir():
        return None
    digest.update((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as weights:
            for start in range(
                0, size, max(size // 16, 1)
            ):  # seventeen places: no need to read 16 GB to tell them apart
                weights.seek(start)
                digest.update(weights.read(4096))
    return digest.hexdigest()


def sampling_defaults(model: str) -> dict:
    """What of a checkpoint's generation_config would change how it is sampled, if an engine read it."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        return {}
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "min_p": None,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "min_new_tokens": None,
        "max_new_tokens": None,
        "max_length": None,
        "num_beams": 1,
    }
    said = config.to_diff_dict()
    return {name: said[name] for name, off in neutral.items() if said.get(name) not in (None, off)}
