"""Rollouts <-> Arrow and parquet, schema version 1. The columns are those of `Rollouts`, one row a response."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from trueup.rollouts import ROW_COLUMNS, TEXT_COLUMNS, TOKEN_COLUMNS, Rollouts, column_of, offsets_of

SCHEMA_VERSION = 1


def write_parquet(rollouts: Rollouts, path: str | Path) -> None:
    """To a temporary name first: a kill leaves the old file or the new one, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    pyarrow.parquet.write_table(to_arrow(rollouts), temporary, compression="zstd")
    os.replace(temporary, path)


def read_parquet(path: str | Path) -> Rollouts:
    return from_arrow(pyarrow.parquet.read_table(path), source=str(path))


def to_arrow(rollouts: Rollouts) -> pa.Table:
    """Schema version 1; the token vectors are shared, not copied."""

    def ragged(values: Tensor, offsets: Tensor, nan_is_null: bool = False) -> pa.Array:
        flat = pa.array(values.numpy(), from_pandas=nan_is_null)
        return pa.ListArray.from_arrays(pa.array(offsets.numpy().astype(np.int32)), flat)

    columns = {
        "prompt_ids": ragged(rollouts.prompt_ids, rollouts.prompt_offsets),
        "response_ids": ragged(rollouts.response_ids, rollouts.offsets),
        "sampler_logprobs": ragged(rollouts.sampler_logprobs, rollouts.offsets, nan_is_null=True),
    }
    if rollouts.learner_logprobs is not None:
        columns["learner_logprobs"] = ragged(rollouts.learner_logprobs, rollouts.offsets, nan_is_null=True)
    columns["loss_mask"] = ragged(rollouts.loss_mask, rollouts.offsets)
    columns["sampler_version"] = ragged(rollouts.sampler_version, rollouts.offsets)
    for name in ROW_COLUMNS:
        columns[name] = pa.array(getattr(rollouts, name).numpy())
    for name in TEXT_COLUMNS:
        columns[name] = pa.array(getattr(rollouts, name), pa.string())
    return pa.table(columns).replace_schema_metadata({"trueup.schema": str(SCHEMA_VERSION)})


def from_arrow(table: pa.Table, source: str = "table") -> Rollouts:
    """Schema version 1 written by whatever tool: any list, integer or float type that holds the values
    will do, and a null is an absent value. Raises ValueError on another version or a missing or unfit column."""
    version = (table.schema.metadata or {}).get(b"trueup.schema", b"1").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(
            f"{source} has trueup.schema={version}; this trueup reads version {SCHEMA_VERSION}: "
            "install the release that wrote it, or convert the file"
        )
    for name in ("prompt_ids", "response_ids", "sampler_logprobs"):
        if name not in table.column_names:
            raise ValueError(f"{source} has no column {name}; it has {table.column_names}")
    count = table.num_rows

    def read(name: str, dtype: torch.dtype, is_list: bool) -> pa.Array:
        column, kind = table.column(name), pa.type_for_alias(str(dtype).removeprefix("torch."))
        try:
            return column.cast(pa.large_list(kind) if is_list else kind).combine_chunks()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            expected = f"list<{kind}>" if is_list else str(kind)
            raise ValueError(f"{source}: {name} is {column.type}, expected {expected}: {error}") from None

    def flat(name: str, array: pa.Array, default) -> Tensor:
        if array.null_count and default is None:
            raise ValueError(f"{source}: {name} holds {array.null_count} null ids; every token has an id")
        return torch.from_numpy(np.array(array.fill_null(default) if array.null_count else array))

    def ragged(name: str, dtype: torch.dtype, default=None) -> tuple[Tensor, Tensor, Tensor]:
        array = read(name, dtype, is_list=True)
        present_B = torch.from_numpy(np.array(array.is_valid()))
        lengths_B = torch.from_numpy(np.array(array.value_lengths().fill_null(0)))
        return flat(name, array.flatten(), default), lengths_B, present_B  # flatten honours slices and null rows

    prompt_ids, prompt_lengths_B, _ = ragged("prompt_ids", torch.int32)
    response_ids, lengths_B, _ = ragged("response_ids", torch.int32)
    offsets = offsets_of(lengths_B)
    built = dict(
        prompt_ids=prompt_ids,
        prompt_offsets=offsets_of(prompt_lengths_B),
        response_ids=response_ids,
        offsets=offsets,
    )
    for name in ("sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version"):
        dtype, default = TOKEN_COLUMNS[name]
        if name in table.column_names:
            values, own_lengths_B, present_B = ragged(name, dtype, default)
            wrong_B = present_B & (own_lengths_B != lengths_B)
            if wrong_B.any():
                row = int(wrong_B.nonzero()[0])
                raise ValueError(
                    f"{source}, row {row}: {name} has {int(own_lengths_B[row])} values for "
                    f"{int(lengths_B[row])} response tokens"
                )
            built[name] = column_of(default, int(offsets[-1]), dtype)
            built[name][present_B.repeat_interleave(lengths_B)] = values
        elif name != "learner_logprobs":
            built[name] = column_of(default, int(offsets[-1]), dtype)
    for name, (dtype, default) in ROW_COLUMNS.items():
        if name in table.column_names:
            built[name] = flat(name, read(name, dtype, is_list=False), default)
        else:
            built[name] = column_of(default, count, dtype)
    for name, default in TEXT_COLUMNS.items():
        known = name in table.column_names
        built[name] = [value or default for value in table.column(name).to_pylist()] if known else [default] * count
    return Rollouts(**built)
