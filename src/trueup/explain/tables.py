"""Files of a dump -> Arrow tables of at most ROWS_AT_ONCE rows, holding only columns that may be read."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trueup.explain.columns import REQUIRED, Mapping, detect, wanted

SCHEMA_VERSION = "1"
ROWS_AT_ONCE = 2048
TOKENS_AT_ONCE = 1 << 18
"""Bounds memory where responses are long, and keeps a batch's vectors near the processor's caches."""
SUFFIXES = (".parquet", ".jsonl")


def expand(patterns: list[str]) -> list[Path]:
    """Files, directories and globs -> files, in order. Raises FileNotFoundError where a pattern gives nothing."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (*SUFFIXES, ".pt"))
            # A run's folder may hold checkpoints too: torch files only where there is nothing else.
            found = [p for p in inside if p.suffix in SUFFIXES] or inside
            if not found:
                raise ValueError(
                    f"{pattern} is a directory without .parquet, .jsonl or .pt files; name the dump's files"
                )
        else:
            found = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
            if not found:
                raise FileNotFoundError(f"no file matches {pattern!r}; give rollout files (.parquet, .jsonl) or a glob")
        files += found
    return files


def read_tables(path: Path, mapping: Mapping, preset: str | None) -> Iterator[tuple[pa.Table, Mapping, str | None]]:
    """Tables of one file, with the mapping that holds for it and the name of its format.

    `mapping` is the user's; where it is empty the columns of the file decide.
    """
    if path.suffix == ".pt":
        from trueup.explain.torchfile import rows_of

        # Not a generator that loads torch by the way: `rows_of` says what is wrong before the first table is asked for.
        yield from _row_tables(iter(rows_of(path)), mapping, preset)
    elif path.suffix in (".jsonl", ".json"):
        yield from _row_tables(_json_rows(path), mapping, preset)
    else:
        yield from _parquet_tables(path, mapping, preset)


def _parquet_tables(path: Path, mapping: Mapping, preset: str | None) -> Iterator[tuple[pa.Table, Mapping, str | None]]:
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
    if not mapping:
        mapping, preset = detect(names)
    may = wanted(mapping)
    # Prompts are the widest column and only stand in for a group that is not there.
    columns = [name for name in names if name in may and not (name == "prompt_ids" and "group" in names)]
    if not _complete(names, mapping):  # nothing to read: the names are all that the message needs
        yield pa.table({name: pa.nulls(0) for name in names}), mapping, preset
        return
    try:
        for batch in file.iter_batches(batch_size=_rows_at_once(file), columns=columns, use_threads=False):
            yield pa.Table.from_batches([batch]), mapping, preset
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} breaks off or is damaged ({error}); write it again") from None


def _rows_at_once(file: pq.ParquetFile) -> int:
    """ROWS_AT_ONCE, or so few that they hold about TOKENS_AT_ONCE values of the longest column."""
    metadata = file.metadata
    if metadata.num_rows == 0 or metadata.num_row_groups == 0:
        return ROWS_AT_ONCE
    group = metadata.row_group(0)
    longest = max((group.column(i).num_values for i in range(group.num_columns)), default=1)
    a_row = max(1, longest // max(group.num_rows, 1))
    return int(min(ROWS_AT_ONCE, max(16, TOKENS_AT_ONCE // a_row)))


def _json_rows(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); expected one object a line") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__}, expected one object a response")
            yield row


def _row_tables(
    rows: Iterator[dict], mapping: Mapping, preset: str | None
) -> Iterator[tuple[pa.Table, Mapping, str | None]]:
    """Python rows -> tables. A column that the first rows lack may come later: names are looked at chunk by chunk."""
    chunk, size, names = [], 0, set()
    for row in rows:
        chunk.append(row)
        size += max((len(value) for value in row.values() if isinstance(value, list)), default=1)
        if len(chunk) == ROWS_AT_ONCE or size > TOKENS_AT_ONCE // 4:
            names.update(*chunk)
            yield _row_table(chunk, names, mapping, preset)
            chunk, size = [], 0
    if chunk:
        names.update(*chunk)
        yield _row_table(chunk, names, mapping, preset)


def _row_table(
    rows: list[dict], names: set[str], mapping: Mapping, preset: str | None
) -> tuple[pa.Table, Mapping, str | None]:
    if not mapping:
        mapping, preset = detect(names)
    may = wanted(mapping)
    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        if name in may:
            columns[name] = _column([row.get(name) for row in rows])
    if not _complete(names, mapping):
        columns = {name: pa.nulls(len(rows)) for name in sorted(names)}
    return pa.table(columns), mapping, preset


def _complete(names: Iterable[str], mapping: Mapping) -> bool:
    """Both log-probs are there, under our names or, where the mapping has others, those."""
    return all(set(names).intersection(mapping.get(ours, (ours,))) for ours in REQUIRED)


def _column(values: list) -> pa.Array:
    for kind in (None, pa.list_(pa.float64()), pa.list_(pa.list_(pa.float64()))):
        try:
            return pa.array(values, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            continue
    # Mixed beyond repair; whoever needs the column says so by its name.
    return pa.array([None if value is None else str(value)[:80] for value in values], pa.string())
