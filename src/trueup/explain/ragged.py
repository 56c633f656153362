"""List columns of a table -> flat arrays and lengths, cut to the response."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from trueup.explain.columns import REQUIRED, WHOLE_SEQUENCE


def ragged(path: Path, table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A list column -> flat values (null becomes NaN, or 0 for whole numbers) and lengths."""
    column = table.column(name).combine_chunks()
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_null(column.type):
        return np.empty(0, np.float32), np.zeros(len(column), np.int64)
    if not (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ):
        raise ValueError(f"{path}: {name} is {column.type}, expected a list of numbers a response")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    lengths_B = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()
    if pa.types.is_null(values.type):
        return np.full(len(values), np.nan, np.float32), lengths_B
    try:
        if name in REQUIRED:
            values = values.cast(pa.float32()) if not pa.types.is_float32(values.type) else values
            return values.to_numpy(zero_copy_only=False), lengths_B
        if name == "loss_mask" and not pa.types.is_boolean(values.type):
            values = values.cast(pa.float32()).fill_null(0)
            return values.to_numpy(zero_copy_only=False) > 0, lengths_B
        if values.null_count:
            values = values.fill_null(True if name == "loss_mask" else 0)
        return values.to_numpy(zero_copy_only=False), lengths_B
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
        raise ValueError(f"{path}: {name} is {column.type}, expected a list of numbers a response ({error})") from None


def select(path: Path, table: pa.Table, token: dict, lead: str, form: str | None) -> dict:
    """Cut padding and prompts away, so that every array is as long as the response."""
    names = table.column_names
    if "response_length" in names:
        length_B = table.column("response_length").to_numpy().astype(np.int64)
        # Ids of the whole sequence end with the response; log-probs and masks that are longer are padded on the right.
        return {name: _cut(*pair, length_B, last=name == "response_ids") for name, pair in token.items()}
    if "response_mask" in names:
        keep_N, keep_B = ragged(path, table, "response_mask")
        keep_N = keep_N.astype(bool)
    elif form in WHOLE_SEQUENCE and "loss_mask" in token:
        mask_N, keep_B = token["loss_mask"]
        offsets = np.concatenate([[0], np.cumsum(keep_B)])
        seen_N = np.cumsum(mask_N)
        before_B = np.concatenate([[0], seen_N])[offsets[:-1]]
        keep_N = seen_N > np.repeat(before_B, keep_B)
    else:
        return token
    kept_B = np.add.reduceat(np.append(keep_N, False), np.concatenate([[0], np.cumsum(keep_B)[:-1]]).astype(int))
    kept_B = np.where(keep_B > 0, kept_B, 0)
    return {
        name: (values[keep_N], kept_B) if np.array_equal(own_B, keep_B) else (values, own_B)
        for name, (values, own_B) in token.items()
    }


def _cut(values: np.ndarray, own_B: np.ndarray, length_B: np.ndarray, last: bool) -> tuple[np.ndarray, np.ndarray]:
    take_B = np.minimum(own_B, length_B)
    local_N = np.arange(len(values)) - np.repeat(np.cumsum(own_B) - own_B, own_B)
    keep_N = local_N >= np.repeat(own_B - take_B, own_B) if last else local_N < np.repeat(take_B, own_B)
    return values[keep_N], take_B
