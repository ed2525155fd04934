"""Convert tensors to and from PyTorch, for every common dtype. PyTorch is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import Array, get_dtype_name, parse_dtype
from hil.errors import UsageError


def to_torch(array: Array, order: Sequence[int] = ()) -> Any:
    """Copy an array to a ``torch.Tensor`` with the same dtype, shape and values.

    Args:
        order: dimensions in memory order, outermost first; () is C order.

    Raises:
        UsageError: PyTorch does not support the dtype.
    """
    import torch

    name = get_dtype_name(array.dtype)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.dtype.itemsize:
        raise UsageError(f"PyTorch does not support {name} tensors")
    stored = array.transpose(order) if order else array
    # Convert through bytes: PyTorch does not accept numpy arrays of bfloat16 or float8.
    flat = np.array(stored, order="C").reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(flat).view(dtype).reshape(stored.shape)
    return tensor.permute(_invert_order(order)) if order else tensor


def _invert_order(order: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse permutation: (0, 3, 1, 2) for (0, 2, 3, 1), an NCHW tensor in NHWC memory order."""
    return tuple(int(axis) for axis in np.argsort(np.array(order, int)))


def convert_from_torch(tensor: Any) -> Array:
    """Return a ``torch.Tensor`` as an array in C order, which may share memory.

    Raises:
        UsageError: hil does not support the dtype.
    """
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    dtype = parse_dtype(name)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(tuple(tensor.shape), dtype)
    found: Array = flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
    return found
