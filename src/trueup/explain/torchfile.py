"""slime's `.pt` dumps -> rows. The only place where reading a dump needs torch; loaded when such a file is given."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


def rows_of(path: Path) -> list[dict]:
    """One dict a response, tensors as lists or NumPy arrays.

    Knows the three layouts of slime: {"samples": [{...}, ...]} of the rollout dump (slime/ray/rollout.py) and of the train
    dump's format_version 2 (slime/backends/megatron_utils/train_dump_utils.py), and {"rollout_data": {name: [...]}} of
    the train dump before it (slime/utils/train_dump_utils.py). Loads tensors and plain values only, never code
    (torch.load with weights_only=True). Raises ValueError saying what the file holds instead.
    """
    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be loaded as tensors and plain values ({str(error).splitlines()[0] if str(error) else error!r}). "
            "trueup runs no code from a dump: where you trust it, convert it to JSONL or parquet, one row a response, "
            "in a script of your own (torch.load with weights_only=False)"
        ) from None
    step = held.get("rollout_id") if isinstance(held, dict) else None
    if isinstance(held, dict) and isinstance(held.get("samples"), list):
        rows = held["samples"]
    elif isinstance(held, dict) and isinstance(held.get("rollout_data"), dict):
        rows = _transposed(held["rollout_data"])
    elif isinstance(held, list):
        rows = held
    else:
        kind = f"a dict with {', '.join(map(str, list(held)[:8]))}" if isinstance(held, dict) else type(held).__name__
        raise ValueError(
            f"{path} holds {kind}; expected slime's `samples` or `rollout_data`, one entry a response. "
            "Convert it to JSONL or parquet, one row a response"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, entry {number}: a {type(row).__name__}, expected a dict a response")
    own = {"rollout_id": step} if isinstance(step, int) else {}
    return [own | {name: _plain(value) for name, value in row.items()} for row in rows]


def _transposed(columns: dict[str, Any]) -> list[dict]:
    """{name: one value a response} -> rows. Columns of another length (schedules, whole-batch values) are left out."""
    lead = next((columns[name] for name in ("tokens", "response_lengths", "log_probs") if name in columns), [])
    per_row = {
        name: values for name, values in columns.items() if hasattr(values, "__len__") and not isinstance(values, str)
    }
    per_row = {name: values for name, values in per_row.items() if len(values) == len(lead)}
    return [{name: values[i] for name, values in per_row.items()} for i in range(len(lead))]


def _plain(value):
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.ndim == 0:
        return value.item()
    return (value.float() if value.is_floating_point() else value).tolist()
