"""Rollouts: the one type that flows through trueup. Its parquet schema is in `arrow.py`.

Token streams are stored packed, as Arrow stores lists: one flat vector over all responses and `offsets` that cut it.
Shapes in names: B responses, P prompt tokens in all, N response tokens in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Columns, with what a reader of a file assumes when an optional one, or a value of it, is absent.
ROW_COLUMNS = {
    "learner_version": (torch.int32, -1),
    "step": (torch.int32, 0),
    "group": (torch.int32, -1),
    "reward": (torch.float32, float("nan")),
    "temperature": (torch.float32, 1.0),
    "top_p": (torch.float32, 1.0),
    "top_k": (torch.int32, -1),
    "min_p": (torch.float32, 0.0),
}
TEXT_COLUMNS = {"finish_reason": "", "engine": ""}
TOKEN_COLUMNS = {
    "response_ids": (torch.int32, None),
    "sampler_logprobs": (torch.float32, float("nan")),
    "learner_logprobs": (torch.float32, float("nan")),
    "loss_mask": (torch.bool, True),
    "sampler_version": (torch.int32, 0),
}


def segment_ids(offsets: Tensor) -> Tensor:
    """The response that each packed token belongs to: [B+1] offsets -> int64 [N]."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


def segment_sum(values_N: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each response's tokens: [N] -> [B]; an empty response sums to 0."""
    total_B = torch.zeros(len(offsets) - 1, dtype=values_N.dtype, device=values_N.device)
    return total_B.index_add(0, segment_ids(offsets), values_N)


def segment_max(values_N: Tensor, offsets: Tensor, empty: float = float("-inf")) -> Tensor:
    """Largest of each response's tokens: [N] -> [B]; an empty response gives `empty`."""
    start_B = torch.full((len(offsets) - 1,), empty, dtype=values_N.dtype, device=values_N.device)
    return start_B.scatter_reduce(0, segment_ids(offsets), values_N, "amax", include_self=False)


def offsets_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """Lengths [B] -> offsets int64 [B+1], starting at 0."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def pack(rows: Sequence[Sequence], dtype: torch.dtype) -> Tensor:
    """A list of rows -> one flat tensor."""
    if not rows:
        return torch.empty(0, dtype=dtype)
    return torch.cat([_row(row, dtype) for row in rows])


def _row(row: Sequence, dtype: torch.dtype) -> Tensor:
    try:
        return torch.as_tensor(row, dtype=dtype)
    except TypeError:  # an engine that has no log-prob for a token says None
        return torch.tensor([float("nan") if value is None else value for value in row], dtype=dtype)


@dataclass
class Rollouts:
    """B responses with everything that is known of them. See `docs/rollouts.md` for the meaning of each column."""

    prompt_ids: Tensor
    """int32 [P], the ids the sampler saw, all prompts end to end."""
    prompt_offsets: Tensor
    """int64 [B+1]."""
    response_ids: Tensor
    """int32 [N], the ids the sampler produced, all responses end to end."""
    offsets: Tensor
    """int64 [B+1]."""
    sampler_logprobs: Tensor
    """float32 [N], log mu of each response token as sampled from; NaN where the engine gave none (null in parquet)."""
    loss_mask: Tensor
    """bool [N], false for tokens the policy did not choose."""
    sampler_version: Tensor
    """int32 [N], the weights that produced each token."""
    learner_version: Tensor
    """int32 [B], the weights that scored the response; -1: not scored."""
    step: Tensor
    """int32 [B], training step."""
    group: Tensor
    """int32 [B], prompt group: the n responses of one prompt share it."""
    reward: Tensor
    """float32 [B]; NaN: not judged yet."""
    temperature: Tensor
    """float32 [B]."""
    top_p: Tensor
    """float32 [B]."""
    top_k: Tensor
    """int32 [B], -1: off."""
    min_p: Tensor
    """float32 [B]."""
    finish_reason: list[str]
    """`stop` or `length`, one a response."""
    engine: list[str]
    """e.g. `vllm:int8`, one a response."""
    learner_logprobs: Tensor | None = None
    """float32 [N], log pi_old at the same temperature; None: not scored yet."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __post_init__(self):
        count, tokens = len(self.offsets) - 1, int(self.offsets[-1])
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != tokens:
                raise ValueError(
                    f"{name} holds {len(column)} tokens but the responses have {tokens}; "
                    "every token column must have one value per response token"
                )
        for name in (*ROW_COLUMNS, *TEXT_COLUMNS):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} holds {len(getattr(self, name))} values for {count} responses")
        if len(self.prompt_offsets) != count + 1:
            raise ValueError(
                f"{len(self.prompt_offsets) - 1} prompts for {count} responses; give one prompt a response"
            )
        if len(self.prompt_ids) != int(self.prompt_offsets[-1]):
            raise ValueError(
                f"prompt_ids holds {len(self.prompt_ids)} tokens but prompt_offsets ends at {int(self.prompt_offsets[-1])}"
            )

    # --- building -------------------------------------------------------------------------------------------------

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        sampler_logprobs: Sequence[Sequence[float]] | None = None,
        **columns,
    ) -> Rollouts:
        """Build from one list of ids a response; every other column may be given as a tensor, a list or one value, columns
        of tokens also as one list a response."""
        count, lengths = len(responses), [len(row) for row in responses]
        offsets = offsets_of(lengths)
        columns["sampler_logprobs"] = sampler_logprobs
        built = dict(
            prompt_ids=pack(prompts, torch.int32),
            prompt_offsets=offsets_of([len(row) for row in prompts]),
            response_ids=pack(responses, torch.int32),
            offsets=offsets,
        )
        for name in ("sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version"):
            dtype, default = TOKEN_COLUMNS[name]
            value = columns.pop(name, None)
            if value is not None:
                built[name] = _token_column(name, value, lengths, dtype)
            elif name != "learner_logprobs":
                built[name] = column_of(default, sum(lengths), dtype)
        for name, (dtype, default) in ROW_COLUMNS.items():
            built[name] = column_of(columns.pop(name, default), count, dtype)
        for name, default in TEXT_COLUMNS.items():
            value = columns.pop(name, default)
            built[name] = [value] * count if isinstance(value, str) else list(value)
        if columns:
            raise TypeError(f"unknown rollout columns {sorted(columns)}; known: {[f.name for f in fields(cls)]}")
        return cls(**built)

    @classmethod
    def from_padded(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        sampler_logprobs: Tensor | None = None,
        learner_logprobs: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **columns,
    ) -> Rollouts:
        """Build from padded [B, T] tensors; the masks are true on real tokens, on whichever side the padding is."""
        response_mask = response_mask.bool()
        prompts = [row[keep] for row, keep in zip(prompt_ids, prompt_mask.bool())]
        responses = [row[keep] for row, keep in zip(response_ids, response_mask)]
        flat = lambda values: None if values is None else values[response_mask]  # noqa: E731
        rollouts = cls.from_lists(prompts, responses, learner_logprobs=flat(learner_logprobs), **columns)
        if sampler_logprobs is not None:
            rollouts.sampler_logprobs = flat(sampler_logprobs).float()
        if loss_mask is not None:
            rollouts.loss_mask = flat(loss_mask).bool()
        return rollouts

    def to_padded(self, values_N: Tensor, fill: float = 0) -> Tensor:
        """Any packed response column [N] -> right-padded [B, longest response]."""
        lengths_B = self.lengths
        width = int(lengths_B.max()) if len(self) else 0
        padded = values_N.new_full((len(self), width), fill)
        padded[torch.arange(width) < lengths_B[:, None]] = values_N
        return padded

    @staticmethod
    def concat(parts: Sequence[Rollouts]) -> Rollouts:
        """Rows of all parts, in order. `learner_logprobs` survive only where every part has them."""
        if not parts:
            raise ValueError("nothing to concatenate: give at least one Rollouts")
        joined = {}
        for name in (f.name for f in fields(Rollouts)):
            columns = [getattr(part, name) for part in parts]
            if name in ("offsets", "prompt_offsets"):
                joined[name] = offsets_of(torch.cat([column.diff() for column in columns]))
            elif any(column is None for column in columns):
                joined[name] = None
            elif isinstance(columns[0], list):
                joined[name] = [value for column in columns for value in column]
            else:
                joined[name] = torch.cat(columns)
        return Rollouts(**joined)

    # --- looking --------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """Response lengths, int64 [B]."""
        return self.offsets.diff()

    @property
    def tokens(self) -> int:
        """Response tokens in all, N."""
        return int(self.offsets[-1])

    def prompt(self, row: int) -> Tensor:
        return self.prompt_ids[self.prompt_offsets[row] : self.prompt_offsets[row + 1]]

    def response(self, row: int) -> Tensor:
        return self.response_ids[self.offsets[row] : self.offsets[row + 1]]

    def rows(self, index: Sequence[int] | Tensor) -> Rollouts:
        """These responses, in this order; or those where a bool [B] is true."""
        index = torch.as_tensor(index)
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index.to(torch.int64)
        token_index = token_rows(self.offsets, index)
        picked = dict(
            prompt_ids=self.prompt_ids[token_rows(self.prompt_offsets, index)],
            prompt_offsets=offsets_of(self.prompt_offsets.diff()[index]),
            offsets=offsets_of(self.lengths[index]),
        )
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            picked[name] = None if column is None else column[token_index]
        for name in ROW_COLUMNS:
            picked[name] = getattr(self, name)[index]
        for name in TEXT_COLUMNS:
            column = getattr(self, name)
            picked[name] = [column[row] for row in index.tolist()]
        return replace(self, **picked)

    # --- files ----------------------------------------------------------------------------------------------------

    def to_parquet(self, path: str | Path) -> None:
        """Write schema version 1, to a temporary name first: a kill leaves the old file or the new one, never half."""
        from trueup.arrow import write_parquet

        write_parquet(self, path)

    @classmethod
    def from_parquet(cls, paths: str | Path | Iterable[str | Path]) -> Rollouts:
        """Read one file or several; optional columns that are absent take the defaults of `from_lists`."""
        from trueup.arrow import read_parquet

        if isinstance(paths, (str, Path)):
            paths = [paths]
        return cls.concat([read_parquet(path) for path in paths])


def token_rows(offsets: Tensor, index: Tensor) -> Tensor:
    """Positions in the flat vector of the rows `index`, in order: int64."""
    lengths = offsets.diff()[index]
    starts = offsets[:-1][index]
    local = torch.arange(int(lengths.sum())) - torch.repeat_interleave(offsets_of(lengths)[:-1], lengths)
    return torch.repeat_interleave(starts, lengths) + local


def column_of(value, length: int, dtype: torch.dtype) -> Tensor:
    """One value for all, or one each -> a column of `length` values."""
    column = torch.as_tensor(value, dtype=dtype)
    return column.expand(length).clone() if column.dim() == 0 else column


def _token_column(name: str, value, lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """One value, a flat column, or one list a response -> [N]. Rows must be as long as the responses they belong to."""
    if not isinstance(value, (list, tuple)) or not value or np.ndim(value[0]) == 0:
        return column_of(value, sum(lengths), dtype)
    if len(value) != len(lengths):
        raise ValueError(f"{name} has {len(value)} rows for {len(lengths)} responses")
    for row, (values, length) in enumerate(zip(value, lengths)):
        if len(values) != length:
            raise ValueError(f"row {row}: {name} has {len(values)} values for {length} response tokens")
    return pack(value, dtype)
