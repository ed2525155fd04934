"""String tensors as table rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hil.compare.values import make_reader
from hil.core.file_tensor import Tensor

# Maximum characters shown per string.
_CHARS = 300


@dataclass(frozen=True)
class TextRow:
    """An element of one tensor, or of two tensors for comparison."""

    index: tuple[int, ...]
    texts: Sequence[str]
    differ: bool


def list_text_rows(arrays: Sequence[Tensor], start: int, most: int) -> list[TextRow]:
    """Return at most ``most`` elements from ``start`` on, in reading order; all tensors have the same shape."""
    found = []
    read = [make_reader(one) for one in arrays]
    for place in range(start, min(start + most, arrays[0].size)):
        texts = [str(one(place, place + 1)[0]) for one in read]
        index = tuple(int(at) for at in np.unravel_index(place, arrays[0].shape)) if arrays[0].shape else ()
        found.append(TextRow(index, [text[:_CHARS] for text in texts], len(set(texts)) > 1))
    return found
