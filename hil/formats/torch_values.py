"""Tensors of ours <-> PyTorch's, for every dtype that both know. PyTorch is imported when one is converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import Array, dtype_name, dtype_of
from hil.errors import UsageError


def to_torch(array: Array, order: Sequence[int] = ()) -> Any:
    """A ``torch.Tensor`` of the same dtype, shape and values, with memory of its own.

    Args:
        order: the dimensions as they are to lie in memory, the outermost first; () is C order.

    Raises:
        UsageError: PyTorch has no tensors of this dtype.
    """
    import torch

    name = dtype_name(array.dtype)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.dtype.itemsize:
        raise UsageError(f"PyTorch has no tensors of dtype {name}")
    stored = array.transpose(order) if order else array
    # By way of bytes: numpy knows neither bfloat16 nor float8 by a name that PyTorch takes.
    flat = np.array(stored, order="C").reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(flat).view(dtype).reshape(stored.shape)
    return tensor.permute(_inverse(order)) if order else tensor


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another: (0, 3, 1, 2) of (0, 2, 3, 1), which an NCHW tensor has that lies as NHWC."""
    return tuple(int(axis) for axis in np.argsort(np.array(order, int)))


def from_torch(tensor: Any) -> Array:
    """The array of a ``torch.Tensor``, in C order; it may share the tensor's memory.

    Raises:
        UsageError: hil has no tensors of this dtype.
    """
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    dtype = dtype_of(name)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(tuple(tensor.shape), dtype)
    found: Array = flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
    return found
