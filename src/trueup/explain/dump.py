"""Rollout dumps, batch by batch: our parquet, and what other frameworks write. Memory does not grow with the dump."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from trueup.explain.columns import REQUIRED, ROW, TOKEN, Mapping, advice
from trueup.explain.ragged import Ragged, ragged, select
from trueup.explain.tables import expand, read_tables

__all__ = ["Batch", "expand", "read_batches"]

ROW_DEFAULTS = {
    "learner_version": -1,
    "step": 0,
    "group": -1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
}
STEP_IN_NAME = re.compile(r"step[_-]?0*(\d+)", re.IGNORECASE)


@dataclass
class Batch:
    """Some responses, packed. B responses, N tokens. Values that cannot be compared are NaN."""

    offsets: np.ndarray
    """int64 [B+1]."""
    sampler_N: np.ndarray
    learner_N: np.ndarray
    mask_N: np.ndarray
    """bool, tokens in the loss."""
    unequal_B: np.ndarray
    """bool: the log-probs are not one a response token; such a response is counted and not compared."""
    row_B: np.ndarray
    """int64, number of the row in the dump."""
    columns: dict[str, np.ndarray]
    """ROW columns, each [B]; `lag` [B]: versions the sampler was behind the learner, NaN where not stamped; `engine` [B]:
    names, empty where unknown."""
    ids_N: np.ndarray | None = None
    engine: str = ""

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def read_batches(files: list[Path], mapping: Mapping, preset: str | None = None) -> Iterator[Batch]:
    """All rows of all files, in order; `mapping` is ours -> theirs, empty: by the column names of each file."""
    row = 0
    for path in files:
        for table, use, form in read_tables(path, mapping, preset):
            batch = _batch(path, _renamed(path, table, use), form)
            batch.row_B = np.arange(row, row + len(batch.lengths))
            row += len(batch.lengths)
            yield batch
    if row == 0:
        raise ValueError(f"{', '.join(map(str, files[:3]))} holds no rows; give a dump with at least one response")


def _renamed(path: Path, table: pa.Table, mapping: Mapping) -> pa.Table:
    """Our names in place of theirs. Raises ValueError, with the remedy, where a log-prob is missing."""
    names = table.column_names
    columns = {ours: name for ours, theirs in mapping.items() for name in theirs[::-1] if name in names}
    for name in names:
        columns.setdefault(name, name)
    for ours in REQUIRED:
        if columns.get(ours) in mapping.get(ours, (ours,)):
            continue
        theirs = " or ".join(repr(name) for name in mapping.get(ours, ()))
        name_it = f"name the column with --columns {ours}=THEIR_NAME"
        unscored = ours == "learner_logprobs" and "sampler_logprobs" in names
        own = f"score the responses with the learner first, or {name_it}"
        hint = advice(names) or (own if unscored else f"if another framework wrote it, {name_it}")
        raise ValueError(
            f"{path} has no column {theirs + ' for ' if theirs else ''}{ours}; it has {', '.join(names) or 'none'}: {hint}"
        )
    return pa.table({ours: table.column(name) for ours, name in columns.items()})


def _batch(path: Path, table: pa.Table, form: str | None) -> Batch:
    token = {name: ragged(path, table, name) for name in TOKEN if name in table.column_names}
    lead = "response_ids" if "response_ids" in token else "sampler_logprobs"
    token = select(path, table, token, form)
    prompt = token.pop("prompt_ids", None)
    lengths_B = token[lead][1]
    flat, unequal_B = _aligned(token, lengths_B)
    offsets = np.concatenate([[0], np.cumsum(lengths_B)])
    columns = {name: _row_column(table, name) for name in ROW}
    if "step" not in table.column_names and (step := _step_of(path)) is not None:
        columns["step"][:] = step
    if (columns["group"] < 0).all():
        if "prompt_ids" in table.column_names:
            prompt = ragged(path, table, "prompt_ids")
        if prompt is not None:
            columns["group"] = _prompt_groups(prompt)
    columns["lag"] = _lag(columns["learner_version"], flat.pop("sampler_version", None), offsets)
    mask_N = flat["loss_mask"].astype(bool) if "loss_mask" in flat else np.ones(int(offsets[-1]), bool)
    if "row_in_loss" in table.column_names:
        mask_N = mask_N & np.repeat(_numbers(table.column("row_in_loss"), 1.0) > 0, lengths_B)
    columns["engine"] = _engines(table)
    return Batch(
        offsets=offsets,
        sampler_N=flat["sampler_logprobs"],
        learner_N=flat["learner_logprobs"],
        mask_N=mask_N,
        unequal_B=unequal_B,
        row_B=np.arange(len(lengths_B)),
        columns=columns,
        ids_N=flat.get("response_ids"),
        engine=next((name for name in np.unique(columns["engine"]) if name), ""),
    )


def _engines(table: pa.Table) -> np.ndarray:
    """Engine names [B], empty where none is known."""
    if "engine" not in table.column_names or not table.num_rows:
        return np.full(table.num_rows, "")
    coded = table.column("engine").cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
    return np.array(coded.dictionary.to_pylist())[coded.indices.to_numpy()]


def _aligned(token: dict[str, Ragged], lengths_B: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Token columns as long as the responses; a response whose log-probs are not is filled with NaN and marked."""
    total, unequal_B = int(lengths_B.sum()), np.zeros(len(lengths_B), bool)
    flat = {}
    for name, (values, own_B) in token.items():
        wrong_B = own_B != lengths_B
        if name in REQUIRED:
            unequal_B |= wrong_B
        if not wrong_B.any():
            flat[name] = values
            continue
        column = np.full(total, np.nan if name in REQUIRED else 1, values.dtype)
        column[np.repeat(~wrong_B, lengths_B)] = values[np.repeat(~wrong_B, own_B)]
        flat[name] = column
    return flat, unequal_B


def _row_column(table: pa.Table, name: str) -> np.ndarray:
    default = ROW_DEFAULTS[name]
    if name not in table.column_names:
        return np.full(table.num_rows, default, np.float64)
    column = table.column(name)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        # Names such as verl's uid: any number that is the same for the same name, whatever the batch.
        return np.array([default if v is None else hash_text(v) for v in column.to_pylist()], np.float64)
    return _numbers(column, default)


def _numbers(column: pa.ChunkedArray, default: float) -> np.ndarray:
    """One number a row; lists of one are taken for it, null and whatever is no number becomes the default."""
    if pa.types.is_list(column.type):
        values = [row[0] if row else default for row in column.to_pylist()]
        return np.array([v if isinstance(v, int | float) else default for v in values], np.float64)
    try:
        return column.cast(pa.float64()).fill_null(default).to_numpy().copy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if pa.types.is_boolean(column.type):
            return column.cast(pa.int8()).cast(pa.float64()).fill_null(default).to_numpy().copy()
        return np.full(len(column), default, np.float64)


def hash_text(text: str) -> int:
    value = 0
    for byte in text.encode():
        value = (value * 1099511628211 + byte + 1) % (1 << 52)
    return value


def _step_of(path: Path) -> int | None:
    """`step_12/rank_0.jsonl`, `train_data_step12.jsonl` -> 12: NeMo-RL says the step nowhere else."""
    found = STEP_IN_NAME.findall(path.stem) or STEP_IN_NAME.findall(path.parent.name)
    return int(found[-1]) if found else None


def _prompt_groups(prompt: Ragged) -> np.ndarray:
    """A number that is equal for equal prompts: a polynomial hash of the ids, exact in float64."""
    ids, lengths_B = prompt
    starts_B = np.cumsum(lengths_B) - lengths_B
    local = np.arange(len(ids)) - np.repeat(starts_B, lengths_B)
    mixed = (ids.astype(np.int64) + 1) * (local * 2654435761 % 1000003 + 1) % 1000000007
    return np.bincount(np.repeat(np.arange(len(lengths_B)), lengths_B), mixed, minlength=len(lengths_B))


def _lag(learner_B: np.ndarray, sampler_N: np.ndarray | None, offsets: np.ndarray) -> np.ndarray:
    lag_B = np.full(len(learner_B), np.nan)
    filled_B = (np.diff(offsets) > 0) & (learner_B >= 0)
    if sampler_N is not None and len(sampler_N) == offsets[-1] and filled_B.any():
        lag_B[filled_B] = learner_B[filled_B] - sampler_N[offsets[:-1][filled_B]]
    return lag_B
