"""Reads rollout dumps batch by batch: our parquet, and parquet or JSONL of others. Memory does not grow with the dump."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trueup.explain.columns import KNOWN, PRESETS, REQUIRED, ROW, TOKEN, detect
from trueup.explain.ragged import ragged, select

SCHEMA_VERSION = "1"
ROWS_AT_ONCE = 2048
ROW_DEFAULTS = {
    "learner_version": -1,
    "step": 0,
    "group": -1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
}


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
    """ROW columns, each [B], and `lag` [B]: versions the sampler was behind the learner, NaN where not stamped."""
    ids_N: np.ndarray | None = None
    engine: str = ""

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def expand(patterns: list[str]) -> list[Path]:
    """Files, directories and globs -> files, in order. Raises FileNotFoundError where a pattern gives nothing."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".jsonl"))
            if not found:
                raise ValueError(f"{pattern} is a directory without .parquet or .jsonl files; name the dump's files")
        else:
            found = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
            if not found:
                raise FileNotFoundError(f"no file matches {pattern!r}; give rollout files (.parquet, .jsonl) or a glob")
        files += found
    return files


def read_batches(files: list[Path], mapping: dict[str, str], preset: str | None = None) -> Iterator[Batch]:
    """All rows of all files, in order; `mapping` is ours -> theirs, empty: by the column names of each file."""
    row = 0
    for path in files:
        for batch in _read_file(path, mapping, preset):
            batch.row_B = np.arange(row, row + len(batch.lengths))
            row += len(batch.lengths)
            yield batch
    if row == 0:
        raise ValueError(f"{', '.join(map(str, files[:3]))} holds no rows; give a dump with at least one response")


def _read_file(path: Path, mapping: dict[str, str], preset: str | None) -> Iterator[Batch]:
    if path.suffix == ".pt":
        raise ValueError(f"{path} is a torch file; convert it to JSONL or parquet, one row a response")
    if path.suffix in (".jsonl", ".json"):
        tables, names = _json_tables(path), None
    else:
        tables, names = _parquet_tables(path)
    for table in tables:
        names = names or table.column_names
        use, form = (mapping, preset) if mapping else detect(names)
        yield _batch(path, _renamed(path, table, use) if use else table, form)


def _parquet_tables(path: Path) -> tuple[Iterator[pa.Table], list[str]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file ({error}); was its writing cut short?") from None
    metadata = file.schema_arrow.metadata or {}
    version = metadata.get(b"trueup.schema", SCHEMA_VERSION.encode()).decode()
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has trueup.schema={version}; this trueup reads version {SCHEMA_VERSION}: "
            "install the release that wrote it, or convert the file"
        )
    names = file.schema_arrow.names
    foreign = {theirs for preset in PRESETS.values() for theirs in preset.values()}
    # Prompts are the widest column and only stand in for a group that is not there.
    wanted = [name for name in names if not (name == "prompt_ids" and "group" in names)]
    wanted = [name for name in wanted if name in KNOWN or name in foreign or not _is_ours(names)]

    def read() -> Iterator[pa.Table]:
        try:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted, use_threads=False):
                yield pa.Table.from_batches([batch])
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} breaks off or is damaged ({error}); write it again") from None

    return read(), names


def _is_ours(names: list[str]) -> bool:
    return all(name in names for name in REQUIRED)


def _json_tables(path: Path) -> Iterator[pa.Table]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); expected one object a line") from None
            if not isinstance(rows[-1], dict):
                raise ValueError(f"{path}, line {number}: a {type(rows[-1]).__name__}, expected one object a response")
            if len(rows) == ROWS_AT_ONCE // 8:
                yield _json_table(rows)
                rows = []
    if rows:
        yield _json_table(rows)


def _json_table(rows: list[dict]) -> pa.Table:
    """Only columns of numbers, text and flat lists of numbers; whatever else a framework logs is left out."""
    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            try:
                columns[name] = pa.array(values, pa.list_(pa.float64()))
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                continue
    return pa.table(columns)


def _renamed(path: Path, table: pa.Table, mapping: dict[str, str]) -> pa.Table:
    columns = {name: table.column(name) for name in table.column_names if name in KNOWN and name not in mapping}
    for ours, theirs in mapping.items():
        if theirs in table.column_names:
            columns[ours] = table.column(theirs)
        elif ours in REQUIRED:
            raise ValueError(f"{path} has no column {theirs!r} for {ours}; it has {', '.join(table.column_names)}")
    return pa.table(columns)


def _batch(path: Path, table: pa.Table, form: str | None) -> Batch:
    for name in REQUIRED:
        if name not in table.column_names:
            hint = (
                "score the responses with the learner first, or"
                if name == "learner_logprobs" and "sampler_logprobs" in table.column_names
                else "if another framework wrote it,"
            )
            raise ValueError(
                f"{path} has no column {name}; it has {', '.join(table.column_names) or 'none'}: {hint} "
                f"name the column with --columns {name}=THEIR_NAME"
            )
    token = {name: ragged(path, table, name) for name in TOKEN if name in table.column_names}
    lead = "response_ids" if "response_ids" in token else "sampler_logprobs"
    token = select(path, table, token, lead, form)
    lengths_B = token[lead][1]
    total, unequal_B = int(lengths_B.sum()), np.zeros(len(lengths_B), bool)
    flat = {}
    for name, (values, own_B) in token.items():
        wrong_B = own_B != lengths_B
        if name in REQUIRED:
            unequal_B |= wrong_B
        if not wrong_B.any():
            flat[name] = values
            continue
        fill = np.nan if name in REQUIRED else 1
        column = np.full(total, fill, values.dtype)
        column[np.repeat(~wrong_B, lengths_B)] = values[np.repeat(~wrong_B, own_B)]
        flat[name] = column
    offsets = np.concatenate([[0], np.cumsum(lengths_B)])
    columns = {name: _row_column(table, name) for name in ROW}
    if "prompt_ids" in table.column_names and (columns["group"] < 0).all():
        columns["group"] = _prompt_groups(path, table)
    columns["lag"] = _lag(columns["learner_version"], flat.pop("sampler_version", None), offsets)
    mask_N = flat["loss_mask"].astype(bool) if "loss_mask" in flat else np.ones(total, bool)
    engine = ""
    if "engine" in table.column_names and table.num_rows:
        engine = next((name for name in table.column("engine").unique().to_pylist() if name), "")
    return Batch(
        offsets=offsets,
        sampler_N=flat["sampler_logprobs"],
        learner_N=flat["learner_logprobs"],
        mask_N=mask_N,
        unequal_B=unequal_B,
        row_B=np.arange(len(lengths_B)),
        columns=columns,
        ids_N=flat.get("response_ids"),
        engine=engine,
    )


def _row_column(table: pa.Table, name: str) -> np.ndarray:
    default = ROW_DEFAULTS[name]
    if name not in table.column_names:
        return np.full(table.num_rows, default, np.float64)
    column = table.column(name)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        # Names such as verl's uid: any number that is the same for the same name, whatever the batch.
        return np.array([default if v is None else hash_text(v) for v in column.to_pylist()], np.float64)
    try:
        return column.cast(pa.float64()).fill_null(default).to_numpy().copy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.full(table.num_rows, default, np.float64)


def hash_text(text: str) -> int:
    value = 0
    for byte in text.encode():
        value = (value * 1099511628211 + byte + 1) % (1 << 52)
    return value


def _prompt_groups(path: Path, table: pa.Table) -> np.ndarray:
    """A number that is equal for equal prompts: a polynomial hash of the ids, exact in float64."""
    ids, lengths_B = ragged(path, table, "prompt_ids")
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
