"""Files -> batches of `Rollouts`: trueup's parquet as it is, everything else through the reader of `trueup explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trueup.arrow import from_arrow
from trueup.explain.columns import parse_columns
from trueup.explain.dump import Batch, read_batches
from trueup.report.gathered import Gathered
from trueup.rollouts import Rollouts, offsets_of

_BATCH_ROWS = 1024
_OURS = ("prompt_ids", "response_ids", "sampler_logprobs")
UNKNOWN_ID = -1
"""Of tokens in dumps that hold no ids."""


def gather(
    files: list[Path], columns: str | None = None, progress: Callable[[int], None] = lambda tokens: None
) -> Gathered:
    """One pass over the files. `progress` is told the tokens of each batch.

    Raises ValueError where a file is no dump, or has no learner's log-probs.
    """
    ours = columns is None and all(_is_ours(path) for path in files)
    if ours:
        try:
            return _gather(((path, row, rollouts) for path in files for row, rollouts in _parquet(path)), progress)
        except ValueError as error:  # log-probs of another length, say: the other reader counts those as missing
            strict = error
    try:
        return _gather(_foreign(files, columns), progress)
    except ValueError as error:
        raise (strict if ours else error) from None


def _gather(batches: Iterator[tuple[Path, int, Rollouts]], progress: Callable[[int], None]) -> Gathered:
    gathered = Gathered()
    for path, row, rollouts in batches:
        gathered.add(rollouts, path.name, row)
        progress(rollouts.tokens)
    return gathered


def _is_ours(path: Path) -> bool:
    if path.suffix in (".jsonl", ".json", ".pt"):
        return False
    try:
        names = pq.read_schema(path).names
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    return all(name in names for name in _OURS)


def _parquet(path: Path) -> Iterator[tuple[int, Rollouts]]:
    """(row of the first response, responses)."""
    with pq.ParquetFile(path) as file:
        row = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield row, from_arrow(pa.Table.from_batches([batch]), source=str(path))
            row += batch.num_rows


def _foreign(files: list[Path], columns: str | None) -> Iterator[tuple[Path, int, Rollouts]]:
    mapping, preset = parse_columns(columns)
    for path in files:
        for batch in read_batches([path], mapping, preset):
            yield path, int(batch.row_B[0]) if len(batch.row_B) else 0, rollouts_of(batch)


def rollouts_of(batch: Batch) -> Rollouts:
    """What the reader of `trueup explain` found, without prompts, rewards and finish reasons, which it does not read."""
    count, tokens, columns = len(batch.lengths), int(batch.offsets[-1]), batch.columns
    version_B = columns["learner_version"].astype(np.int32)
    behind_B = np.nan_to_num(columns["lag"]).astype(np.int32)
    ids_N = np.full(tokens, UNKNOWN_ID) if batch.ids_N is None else batch.ids_N
    row = {name: torch.from_numpy(columns[name].astype(np.float32)) for name in ("temperature", "top_p", "min_p")}
    row |= {name: torch.from_numpy(columns[name].astype(np.int32)) for name in ("step", "top_k")}
    return Rollouts(
        prompt_ids=torch.empty(0, dtype=torch.int32),
        prompt_offsets=offsets_of([0] * count),
        response_ids=torch.from_numpy(ids_N.astype(np.int32)),
        offsets=torch.from_numpy(batch.offsets.astype(np.int64)),
        sampler_logprobs=torch.from_numpy(np.array(batch.sampler_N, np.float32)),
        learner_logprobs=torch.from_numpy(np.array(batch.learner_N, np.float32)),
        loss_mask=torch.from_numpy(np.array(batch.mask_N, bool)),
        sampler_version=torch.from_numpy(np.repeat(version_B - behind_B, batch.lengths)),
        learner_version=torch.from_numpy(version_B),
        group=torch.arange(count, dtype=torch.int32),
        reward=torch.full((count,), float("nan")),
        finish_reason=[""] * count,
        engine=[batch.engine] * count,
        **row,
    )
