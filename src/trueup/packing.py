"""What callers hand in -> packed tensors, and results back in the caller's kind and shape. Pure functions.

Packed: one flat vector [N] over all responses with `offsets` int64 [B+1]. Padded: [B, T] with a mask that tells tokens from
padding. Torch tensors on any device, NumPy arrays, or anything NumPy reads (None in a list is a missing value).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.rollouts import offsets_of


@dataclass(frozen=True)
class Packed:
    """Columns of N tokens in B responses, without gradient, on one device."""

    columns: dict[str, Tensor | None]
    """[N] each, in the type they came in; None where none was given."""
    mask_N: Tensor
    """bool [N], chosen by the policy."""
    offsets: Tensor
    """int64 [B+1]."""
    padded_mask: Tensor | None
    """bool [B, T], where the tokens lay in a padded batch; None: they came packed."""
    numpy: bool
    """No column came as a tensor: results go back as arrays."""

    def restore(self, values_N: Tensor) -> Tensor | np.ndarray:
        """[N] -> the caller's kind and shape; 0 (or False) at padding."""
        values = values_N
        if self.padded_mask is not None:
            values = torch.zeros(self.padded_mask.shape, dtype=values_N.dtype, device=values_N.device)
            values = values.masked_scatter(self.padded_mask, values_N)
        return values.numpy() if self.numpy else values


def pack_columns(
    columns: Mapping[str, object], offsets, loss_mask_N, main: str | None = None, per_response: Iterable[str] = ()
) -> Packed:
    """Columns by name (the first says what shape all must have), with offsets, or None for padded -> `Packed`.

    main: the column whose device all go to; None: the first. per_response: columns that may hold one value a response,
    [B] or [B, 1], where the others are padded [B, T]. Raises ValueError naming what does not fit.
    """
    found = {name: None if value is None else _tensor(value) for name, value in columns.items()}
    first = next(iter(found))
    device = (found[first] if main is None or found[main] is None else found[main]).device
    found = {name: None if value is None else value.to(device) for name, value in found.items()}
    mask = None if loss_mask_N is None else _tensor(loss_mask_N).to(device).bool()
    shape, padded = found[first].shape, offsets is None
    if padded and mask is None:
        raise ValueError("offsets=None means padded [B, T] inputs; they need loss_mask_N to tell tokens from padding")
    expected = (2, "padded [B, T]") if padded else (1, "packed [N]")
    if len(shape) != expected[0]:
        hint = "" if padded else "; for padded tensors pass offsets=None and loss_mask_N"
        raise ValueError(
            f"{first} has shape {tuple(shape)}, expected {expected[1]} with offsets={'None' if padded else 'given'}{hint}"
        )
    for name in per_response:
        value = found.get(name)
        if padded and value is not None and value.shape in ((shape[0],), (shape[0], 1)):
            found[name] = value.reshape(-1, 1).expand(shape)
    for name, value in {**found, "loss_mask_N": mask}.items():
        if value is not None and value.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} but {first} has {tuple(shape)}; they must hold the same tokens"
            )
    numpy = not any(isinstance(value, Tensor) for value in columns.values())
    if padded:
        cut = {name: None if value is None else value[mask] for name, value in found.items()}
        return Packed(cut, mask.new_ones(len(cut[first])), offsets_of(mask.sum(1)), mask, numpy)
    offsets = _tensor(offsets).to(device, torch.int64)
    _check_offsets(offsets, len(found[first]))
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=device)
    return Packed(found, mask, offsets, None, numpy)


def wide(values: Tensor) -> Tensor:
    """As float64; float32 on Apple GPUs, which have no float64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _check_offsets(offsets: Tensor, tokens: int) -> None:
    shaped = offsets.dim() == 1 and len(offsets) > 0
    if not shaped or offsets[0] != 0 or offsets[-1] != tokens or (offsets.diff() < 0).any():
        ends = f" running from {int(offsets[0])} to {int(offsets[-1])}" if shaped else ""
        raise ValueError(
            f"offsets must rise from 0 to the number of tokens, {tokens}, one entry more than there are responses; "
            f"got shape {tuple(offsets.shape)}{ends}"
        )


def _tensor(value) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    return torch.as_tensor(array.astype(np.float64) if array.dtype == object else array)  # None becomes NaN
