"""List columns of a table -> flat arrays and lengths, cut to the response."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from trueup.explain.columns import REQUIRED, WHOLE_SEQUENCE

Ragged = tuple[np.ndarray, np.ndarray]
"""Flat values [N] and lengths [B]."""


def ragged(path: Path, table: pa.Table, name: str) -> Ragged:
    """A list column -> flat values (null becomes NaN, or 0 for whole numbers) and lengths."""
    column = table.column(name).combine_chunks()
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_null(column.type):
        return np.empty(0, np.float32), np.zeros(len(column), np.int64)
    column = _unwrapped(_as_lists(column))
    if not _is_list(column.type):
        raise ValueError(f"{path}: {name} is {column.type}, expected a list of numbers a response")
    lengths_B = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()
    if pa.types.is_null(values.type):
        return np.full(len(values), np.nan, np.float32), lengths_B
    try:
        if name in REQUIRED:
            values = values.cast(pa.float32()) if not pa.types.is_float32(values.type) else values
            return values.to_numpy(zero_copy_only=False), lengths_B
        if name in ("loss_mask", "response_mask"):
            if not pa.types.is_boolean(values.type):
                return values.cast(pa.float32()).fill_null(0).to_numpy(zero_copy_only=False) > 0, lengths_B
            values = values.fill_null(True) if values.null_count else values
            return values.to_numpy(zero_copy_only=False), lengths_B
        values = values.fill_null(0) if values.null_count else values
        return values.to_numpy(zero_copy_only=False), lengths_B
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
        raise ValueError(f"{path}: {name} is {column.type}, expected a list of numbers a response ({error})") from None


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _as_lists(column: pa.Array) -> pa.Array:
    return column.cast(pa.list_(column.type.value_type)) if pa.types.is_fixed_size_list(column.type) else column


def _unwrapped(column: pa.Array) -> pa.Array:
    """[[...]] -> [...]: NeMo-RL logs slices of one sample."""
    if not (_is_list(column.type) and _is_list(column.type.value_type)):
        return column
    single = column.null_count == 0 and (column.value_lengths().to_numpy(zero_copy_only=False) == 1).all()
    return _as_lists(column.flatten()) if single else column


def select(path: Path, table: pa.Table, token: dict[str, Ragged], form: str | None) -> dict[str, Ragged]:
    """Cut padding and prompts away, so that every array is as long as the response.

    What the ids of a whole sequence hold before the response is returned as `prompt_ids`.
    """
    names = table.column_names
    if "response_length" in names:
        column = table.column("response_length")
        if not pa.types.is_integer(column.type):
            raise ValueError(f"{path}: response_length is {column.type}, expected a whole number a response")
        length_B = column.fill_null(0).to_numpy().astype(np.int64)
        # Ids of the whole sequence end with the response; log-probs and masks that are longer are padded on the right.
        cut = {name: _window(pair, np.zeros_like(length_B), length_B) for name, pair in token.items()}
        if "response_ids" in token:
            values, own_B = token["response_ids"]
            start_B = np.maximum(own_B - length_B, 0)
            cut["response_ids"] = _window((values, own_B), start_B, length_B)
            if "prompt_ids" not in names and start_B.any():
                cut["prompt_ids"] = _window((values, own_B), np.zeros_like(start_B), start_B)
        return cut
    if "response_mask" in names:
        written_N, own_B = ragged(path, table, "response_mask")
        written_N = written_N.astype(bool)
    elif form in WHOLE_SEQUENCE and "loss_mask" in token:
        written_N, own_B = token["loss_mask"]
        written_N = written_N.astype(bool)
    else:
        return token
    # From the first token that the policy wrote to the last: what is false between them (a tool's words) is no padding.
    first_B, last_B = _span(written_N, own_B)
    cut = {}
    for name, pair in token.items():
        same = np.array_equal(pair[1], own_B)
        cut[name] = _window(pair, first_B, last_B - first_B) if same else pair
    if "response_mask" in names:
        written = _window((written_N, own_B), first_B, last_B - first_B)
        mask = cut.get("loss_mask")
        both = mask is not None and np.array_equal(mask[1], written[1])
        cut["loss_mask"] = (mask[0].astype(bool) & written[0], written[1]) if both else written
    elif "prompt_ids" not in names and "response_ids" in token and np.array_equal(token["response_ids"][1], own_B):
        cut["prompt_ids"] = _window(token["response_ids"], np.zeros_like(first_B), first_B)
    return cut


def _span(flag_N: np.ndarray, own_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First true position and one past the last, [B] each; 0 and 0 where none is true."""
    ends_B = np.cumsum(own_B)
    starts_B = ends_B - own_B
    at = np.flatnonzero(flag_N)
    low_B, high_B = np.searchsorted(at, starts_B), np.searchsorted(at, ends_B)
    some_B = high_B > low_B
    first_B, last_B = np.zeros_like(own_B), np.zeros_like(own_B)
    first_B[some_B] = at[low_B[some_B]] - starts_B[some_B]
    last_B[some_B] = at[high_B[some_B] - 1] + 1 - starts_B[some_B]
    return first_B, last_B


def _window(pair: Ragged, start_B: np.ndarray, length_B: np.ndarray) -> Ragged:
    """`length_B` values of each response from `start_B` on, or as many as there are."""
    values, own_B = pair
    take_B = np.clip(own_B - start_B, 0, length_B)
    if len(own_B) == 0 or np.array_equal(take_B, own_B):
        return pair
    local_N = np.arange(len(values)) - np.repeat(np.cumsum(own_B) - own_B, own_B)
    keep_N = (local_N >= np.repeat(start_B, own_B)) & (local_N < np.repeat(start_B + take_B, own_B))
    return values[keep_N], take_B
